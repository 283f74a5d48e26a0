"""Cut a stored tensor into regions that can be merged one after the other.

A region is a contiguous range of the stored bytes, so that every byte is read once, in order, and hashed on the way:
* elementwise methods: chunks that stay in the cache;
* stacked experts: one matrix of the mixture at a time;
* packed q, k, v: one block of rows at a time;
* everything else: the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.layout.types import Role, TensorLayout
from actmat.methods.facets import ActsOn

CHUNK = 1 << 19
"""Entries of a chunk: 1 MB of bfloat16, 2 MB of float32. Fixed, because results must not depend on it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Entries `start:stop` of the flattened tensor, seen as `shape`, with their layout.

    `label` names the region in records: "q", "3/gate", "" for a whole tensor.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    layout: TensorLayout
    label: str = ""

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.stop - self.start


def cut(shape: Sequence[int], layout: TensorLayout, acts_on: ActsOn) -> list[Region]:
    """Parts of a tensor of this shape for a method that acts on elements, whole tensors or matrices."""
    numel = math.prod(shape)
    whole = [Region(0, numel, tuple(shape), layout)]
    if acts_on == "elementwise":
        flat = TensorLayout(layout.role, layout.reason)
        starts = range(0, max(numel, 1), CHUNK)
        return [Region(s, min(s + CHUNK, numel), (min(s + CHUNK, numel) - s,), flat) for s in starts]
    if acts_on == "tensor":
        return whole
    if layout.role is Role.STACKED_EXPERTS and len(shape) == 3:
        size = shape[1] * shape[2]
        of_one = TensorLayout(Role.FUSED_LINEAR if layout.blocks else Role.LINEAR, layout.reason, layout.orientation,
                           layout.blocks)  # fmt: skip
        return [
            Region(e * size + p.start, e * size + p.stop, p.shape, p.layout, f"{e}/{p.label}" if p.label else str(e))
            for e in range(shape[0])
            for p in cut(shape[1:], of_one, acts_on)
        ]
    if layout.blocks and layout.orientation == "OI" and all(b.groups == 1 for b in layout.blocks):
        rows = math.prod(shape[1:])
        single = TensorLayout(Role.LINEAR, layout.reason)
        return [
            Region(b.start * rows, b.stop * rows, (b.stop - b.start, *shape[1:]), single, b.name)
            for b in sorted(layout.blocks, key=lambda b: b.start)
        ]
    return whole


def matrix_label(region: Region, k: int) -> str:
    """Label of logical matrix `k` of a region in records: "q", "3/gate"."""
    blocks = region.layout.blocks
    return "/".join(x for x in (region.label, blocks[k].name if blocks else "") if x)
