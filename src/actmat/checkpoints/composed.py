"""`Composed`: tensors that are renamed, cut or joined from stored ones, as ranges of their bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from actmat.checkpoints.base import Tensors, TensorsHandle, TensorSpec, View


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop - 1` of a tensor of source number `source`."""

    source: int
    name: str
    start: int
    stop: int


Pieces = Mapping[str, tuple[Piece | bytes, ...]]
"""Name of a tensor -> the pieces of it, in order; those that are stored nowhere are bytes."""


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
        location: str = "",
        address: str = "",
        *,
        handle: TensorsHandle | None = None,
    ) -> None:
        self.pieces, self.specs, self.aliases = dict(pieces), dict(specs), dict(aliases or {})
        super().__init__(sources, self.pieces, self.specs, self.aliases, location, address)
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

    def parts(self, name: str) -> tuple[tuple[TensorSpec, ...], str]:
        """The stored tensors of all pieces, if these are coded; else itself."""
        parts = [self.sources[p.source].parts(p.name) for p in self.pieces[name] if isinstance(p, Piece)]
        scheme = next((scheme for _, scheme in parts if scheme), "")
        return (tuple(s for specs, _ in parts for s in specs), scheme) if scheme else super().parts(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        pieces = [piece for name in names for piece in self.pieces.get(name, ()) if isinstance(piece, Piece)]
        for number, name in dict.fromkeys((piece.source, piece.name) for piece in pieces):
            self.sources[number].prefetch([name])

    def handle(self) -> TensorsHandle:
        """Addresses of the sources, with the pieces, unless the whole has one."""
        if self._handle is not None:
            return self._handle
        handle = super().handle()
        return replace(handle, address=self._address or handle.address)


def _size(piece: Piece | bytes) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.stop - piece.start


def whole(spec: TensorSpec, source: int = 0) -> tuple[Piece]:
    """All bytes of a stored tensor, as the only piece of another."""
    return (Piece(source, spec.name, 0, spec.nbytes),)


def renamed(source: Tensors, names: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> Composed:
    """Tensors by other names, new -> stored; several may be copies of one. See `Composed`."""
    specs = {new: replace(source.specs[stored], name=new) for new, stored in names.items()}
    return Composed([source], {new: whole(source.specs[stored]) for new, stored in names.items()}, specs, aliases)
