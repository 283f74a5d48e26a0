"""`Composed`: tensors that are renamed, cut or joined from stored ones, as ranges of their bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from actmat.checkpoints.base import StoredParts, Tensors, TensorsHandle, TensorSpec, View


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop - 1` of a tensor of source number `source`."""

    source: int
    name: str
    start: int
    stop: int


Pieces = Mapping[str, tuple[Piece | bytes, ...]]
"""Name of a tensor -> the pieces of it, in order; those that are stored nowhere are bytes."""


@dataclass(frozen=True, slots=True)
class ComposedHandle:
    """Address of `Composed` tensors: a `ViewHandle`."""

    sources: tuple[TensorsHandle, ...]
    pieces: Pieces
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    location: str
    address: str

    def open(self, open_handle: Callable[[TensorsHandle], Tensors]) -> Tensors:
        """The tensors; closing them closes the sources."""
        opened = [open_handle(source) for source in self.sources]
        return Composed(opened, self.pieces, self.specs, self.aliases, location=self.location, address=self.address)


class Composed(View):
    """Tensors made of pieces of others.

    Args:
        sources: of the pieces; closed with this.
        pieces: of every tensor.
        specs: of every tensor, in the order of reading.
        aliases: see `Tensors`.
        location: default: that of the first source.
        address: names the same tensors in any process; default: that of the first source.
        handle: opens the same tensors as a whole; default: opens the sources, and puts the pieces together.
    """

    def __init__(
        self,
        sources: Sequence[Tensors],
        pieces: Pieces,
        specs: Mapping[str, TensorSpec],
        aliases: Mapping[str, str] | None = None,
        *,
        location: str = "",
        address: str = "",
        handle: TensorsHandle | None = None,
    ) -> None:
        super().__init__(sources)
        self.pieces, self.specs, self.aliases = pieces, specs, aliases or {}
        self._address, self._handle = address, handle
        self.location = location or self.location

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the pieces, one after the other."""
        pieces = self.pieces[spec.name]
        ends = list(accumulate(_size(piece) for piece in pieces))
        done, number = 0, bisect_right(ends, start)
        while done < len(out):
            piece = pieces[number]
            size = min(len(out) - done, ends[number] - start - done)
            first = start + done - (ends[number] - _size(piece))
            if isinstance(piece, bytes):
                out[done : done + size] = piece[first : first + size]
            else:
                self.sources[piece.source].read_into(piece.name, piece.start + first, out[done : done + size])
            done += size
            number += 1

    def parts(self, name: str) -> StoredParts:
        """The stored tensors of all pieces, if these are coded; else itself."""
        parts = [self.sources[p.source].parts(p.name) for p in self.pieces[name] if isinstance(p, Piece)]
        scheme = next((part.scheme for part in parts if part.scheme), "")
        return StoredParts(tuple(s for part in parts for s in part.specs), scheme) if scheme else super().parts(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        pieces = [piece for name in names for piece in self.pieces.get(name, ()) if isinstance(piece, Piece)]
        for number, name in dict.fromkeys((piece.source, piece.name) for piece in pieces):
            self.sources[number].prefetch([name])

    def handle(self) -> TensorsHandle:
        """Addresses of the sources, with the pieces, unless the whole has one."""
        if self._handle is not None:
            return self._handle
        sources = tuple(source.handle() for source in self.sources)
        address = self._address or sources[0].address
        view = ComposedHandle(
            sources, dict(self.pieces), dict(self.specs), dict(self.aliases), self.location, self._address
        )
        return TensorsHandle(address, "composed", self.location, view=view)


def _size(piece: Piece | bytes) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.stop - piece.start


def whole(spec: TensorSpec, source: int = 0) -> tuple[Piece]:
    """All bytes of a stored tensor, as the only piece of another."""
    return (Piece(source, spec.name, 0, spec.nbytes),)
