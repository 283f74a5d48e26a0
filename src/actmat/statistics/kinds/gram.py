"""Gram matrices of layer inputs: sums of outer products, half of the symmetric matrix, in matrix products.

    G = sum_n z_n z_n^T        over the rows `z_n` of all batches that were added

Every batch is one float32 product per block of rows of the lower triangle, added to a float64 sum; entries above the
diagonal blocks are not computed. The packed form lists the lower triangle row by row: entry `(i, j)`, `j <= i`, lies
at `i (i + 1) / 2 + j`.

Shapes: `N` rows (tokens), `I` in_features, `G` groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.errors import StatisticsError
from actmat.extras.collect.inputs.layer_inputs import LayerInputs
from actmat.extras.collect.settings import FLOATS
from actmat.statistics.header import GramInfo, GramOf, Header
from actmat.statistics.kinds.base import File, Kind, Mean, Run, StoredTensors

__all__ = ["GRAM", "GramSum", "packed_size", "unpack"]

BLOCK = 128
"""Rows of one block of the triangle: at I = 1024, 9/16 of the full product; large enough for a fast product."""

Part = tuple[int | None, tuple[int, ...] | None]
"""Expert and output features of a `GramOf`."""


def packed_size(width: int) -> int:
    """Entries of the lower triangle of an `I x I` matrix."""
    return width * (width + 1) // 2


class GramSum:
    """A running `sum z z^T` of width `I`, always in float64.

    `groups` (a convolution's) is the number of independent sums; rows then have the shape `N G I`. The products are in
    `dtype`, float32 or float64.
    """

    def __init__(
        self, width: int, groups: int = 1, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.width = width
        self.groups = groups
        self.rows = 0
        self._dtype = dtype
        self._starts = range(0, width, BLOCK)
        shapes = [(min(BLOCK, width - s), min(s + BLOCK, width)) for s in self._starts]
        # float64 is unknown to some accelerators; there the sums stay on the CPU
        self._home = torch.device(device) if torch.device(device).type in ("cpu", "cuda") else torch.device("cpu")
        self._sums = [torch.zeros(groups, *s, dtype=torch.float64, device=self._home) for s in shapes]

    def add(self, rows_NI: Tensor) -> None:
        """Add rows, `N I` (`N G I` for groups)."""
        rows = rows_NI.detach().to(self._dtype)
        rows_GNI = rows.unsqueeze(0) if rows.ndim == 2 else rows.transpose(0, 1)
        self.rows += rows_GNI.shape[1]
        for start, total in zip(self._starts, self._sums, strict=True):
            stop = start + total.shape[1]
            product = rows_GNI[..., start:stop].mT @ rows_GNI[..., :stop]
            total.add_(product.to(self._home))

    def packed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The lower triangle: `I(I+1)/2` entries, or `G` times as many, on the CPU."""
        out = torch.empty(self.groups, packed_size(self.width), dtype=dtype)
        for start, total in zip(self._starts, self._sums, strict=True):
            block = total.to("cpu", dtype)
            for r in range(total.shape[1]):
                i = start + r
                out[:, packed_size(i) : packed_size(i + 1)] = block[:, r, : i + 1]
        return out if self.groups > 1 else out[0]

    def nonfinite(self) -> bool:
        """Return True if a NaN or infinity was added: a sum of squares keeps it."""
        return not all(bool(torch.isfinite(s.sum())) for s in self._sums)


def unpack(packed: Tensor, width: int) -> Tensor:
    """The full symmetric `*batch I I` of `*batch I(I+1)/2`."""
    full = packed.new_empty(*packed.shape[:-1], width, width)
    for i in range(width):
        full[..., i, : i + 1] = packed[..., packed_size(i) : packed_size(i + 1)]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        corner = full[..., start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        full[..., start:stop, stop:] = full[..., stop:, start:stop].mT
    return full


class _Gram(Kind[LayerInputs[GramSum]]):
    """Gram matrices of layer inputs, and look-ups of tables."""

    name = "gram"

    def start(self, run: Run) -> LayerInputs[GramSum]:
        settings = run.settings
        own = next((p.device for p in run.binding.weights().values()), torch.device("cpu"))
        device = torch.device(settings.sums_on) if settings.sums_on else own

        def make(width: int, groups: int) -> GramSum:
            return GramSum(width, groups, dtype=FLOATS[settings.compute_dtype], device=device)

        return LayerInputs(run.model, run.binding, make, share=settings.share, mask=settings.mask, only=settings.only)

    def store(self, measured: LayerInputs[GramSum], run: Run, out: StoredTensors) -> dict[str, Any]:
        grams: dict[str, GramInfo] = {}
        places: dict[str, list[GramOf]] = {}
        bad: list[str] = []
        dtype = FLOATS[run.settings.dtype]
        for named in measured.sums():
            total = named.sum
            if total.nonfinite():
                bad.append(f"the inputs of '{named.parameter}' hold NaN or Inf")
                continue
            shape = _packed_shape(total.width, total.groups)
            digest = out.add(f"gram.{named.key}", shape, partial(total.packed, dtype))
            stack = named.parameter if named.parameter in measured.tokens else None
            size = {"width": total.width, "groups": total.groups, "rows": total.rows}
            grams[named.key] = GramInfo(**size, stack=stack, hash=digest)
            for r in named.readers:
                rows = None if r.rows is None else list(r.rows)
                places.setdefault(r.parameter, []).append(GramOf(gram=named.key, expert=r.expert, rows=rows))
        if bad:
            raise StatisticsError(f"The model gives values that are not finite: {len(bad)} problem(s).", bad)
        counts: dict[str, str] = {}
        for parameter, found in measured.counts.items():
            for piece in run.binding.located[parameter].slices:
                name = f"counts.{piece.name}"
                counts[piece.name] = out.add(name, found.shape, found.contiguous, "int64")
        return {
            "grams": grams,
            "places": {n: places[n] for n in sorted(places)},
            "stacks": dict(measured.tokens),
            "absent": measured.absent(set(places)),
            "counts": counts,
        }

    def add_up(self, headers: Sequence[Header], hashes: Mapping[str, str]) -> dict[str, Any]:
        grams: dict[str, GramInfo] = {}
        for key in {k: None for h in headers for k in h.grams}:
            found = [h.grams[key] for h in headers if key in h.grams]
            update = {"rows": sum(g.rows for g in found), "hash": hashes[f"gram.{key}"]}
            grams[key] = found[0].model_copy(update=update)
        places: dict[str, list[GramOf]] = {}
        for name in sorted({n for h in headers for n in h.places}):
            parts = {k: v for h in headers for k, v in _by_part(h, name).items()}
            places[name] = [GramOf(gram=g, expert=e, rows=list(r) if r else None) for (e, r), g in parts.items()]
        stacks = {k: None for h in headers for k in h.stacks}
        counts = {n: hashes[f"counts.{n}"] for h in headers for n in h.counts}
        return {
            "grams": grams,
            "places": places,
            "stacks": {n: sum(h.stacks.get(n, 0) for h in headers) for n in stacks},
            "absent": {n: w for h in headers for n, w in h.absent.items() if n not in places and n not in counts},
            "counts": counts,
        }

    def read(self, header: Header, key: str, stored: Tensor, mean: Mean) -> Tensor:
        info = header.grams[key]
        # an expert of a mixture: the mean is over all tokens that came to its router
        tokens = info.rows if info.stack is None else header.stacks[info.stack]
        divisor = {"token": tokens, "sample": header.samples, "sum": 1}[mean]
        return unpack(stored.div_(max(divisor, 1)), info.width)

    def summary(self, header: Header) -> str:
        return f"{len(header.grams)} Gram matrices for {len(header.places)} tensors" if header.grams else ""

    def problems(self, header: Header, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
        for key, info in header.grams.items():
            spec, shape = specs.get(f"gram.{key}"), _packed_shape(info.width, info.groups)
            if spec is not None and (spec.shape != shape or spec.dtype not in ("float32", "float64")):
                found = f"{'x'.join(map(str, spec.shape))} {spec.dtype}"
                yield f"tensor 'gram.{key}': expected {'x'.join(map(str, shape))} floats, found {found}"
            if info.stack is not None and info.stack not in header.stacks:
                yield f"'{key}' is of the stack '{info.stack}', which is not listed"
        for name, parts in header.places.items():
            for part in parts:
                if part.gram not in header.grams:
                    yield f"'{name}' reads '{part.gram}', which is not there"
                if part.rows is not None and part.rows[0] >= part.rows[1]:
                    yield f"'{name}': rows {part.rows} are no range"

    def conflicts(self, first: File, other: File) -> Iterator[str]:
        for name in first.header.places.keys() & other.header.places.keys():
            mine, theirs = _by_part(first.header, name), _by_part(other.header, name)
            if any(mine[k] != theirs[k] for k in mine.keys() & theirs.keys()):
                yield f"'{name}' shares its Gram with other layers in {other.location} than elsewhere"


GRAM = _Gram()


def _packed_shape(width: int, groups: int) -> tuple[int, ...]:
    return (packed_size(width),) if groups == 1 else (groups, packed_size(width))


def _by_part(header: Header, name: str) -> dict[Part, str]:
    """Part of a stored tensor -> key of its Gram."""
    return {(p.expert, tuple(p.rows) if p.rows else None): p.gram for p in header.places.get(name, [])}
