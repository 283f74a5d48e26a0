"""Layout of a stored tensor: its role, its orientation, the logical matrices packed in it.

Shapes: `O` out_features, `I` in_features, `E` stacked experts of a mixture, `K` packed blocks.
A *logical matrix* is `*batch O I`: a linear map `y = W z` of `I` inputs to `O` outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor


class Role(StrEnum):
    """Meaning of a tensor."""

    LINEAR = "linear"  # one linear map
    FUSED_LINEAR = "fused_linear"  # several linear maps packed in one tensor (q, k, v; gate, up)
    STACKED_EXPERTS = "stacked_experts"  # one linear map per expert of a mixture, 3-D
    CONVOLUTION = "convolution"
    ROUTER = "router"  # the linear map that chooses the experts of a mixture, averaged by default
    EMBEDDING = "embedding"  # a table of vectors: token, position, class embeddings; relative position biases
    VECTOR = "vector"  # biases, norms, scales, scalars; any float tensor that is none of the above
    BUFFER = "buffer"  # integers and booleans, copied from the base

    @property
    def is_matrix(self) -> bool:
        """Roles of linear maps."""
        return self in (Role.LINEAR, Role.FUSED_LINEAR, Role.STACKED_EXPERTS, Role.ROUTER)


Orientation = Literal["OI", "IO"]
"""OI: stored like `nn.Linear.weight`; IO: transposed, like GPT-2's `Conv1D` or CLIP's `visual.proj`."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start:stop` (along the O axis, after orientation) of a packed tensor.

    Interleaved packings (GPT-NeoX, Falcon, BLOOM: per head q, k, v) give `groups`: the O axis is seen as
    `(groups, O / groups)` and the block is `start:stop` of the second factor of every group.
    """

    name: str
    start: int
    stop: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of one tensor; `reason` states in words how it was decided and is shown in plans."""

    role: Role
    reason: str
    orientation: Orientation = "OI"
    blocks: tuple[Block, ...] = ()

    def to_matrices(self, tensor: Tensor) -> list[Tensor]:
        """The logical matrices of a stored tensor, each `*batch O I` (views where possible).

        Linear `O I` -> one; fused -> one per block; stacked `E O I` -> batched; convolution `O I k...` -> `O, I k...`.

        >>> layout = TensorLayout(Role.FUSED_LINEAR, "q and k", blocks=(Block("q", 0, 4), Block("k", 4, 6)))
        >>> [tuple(m.shape) for m in layout.to_matrices(torch.zeros(6, 3))]
        [(4, 3), (2, 3)]
        """
        if self.role is Role.CONVOLUTION:
            return [tensor.flatten(1)]
        matrix = tensor.mT if self.orientation == "IO" else tensor
        rows = [_grouped(matrix, b.groups)[..., b.start : b.stop, :].flatten(-3, -2) for b in self.blocks]
        return rows or [matrix]

    def from_matrices(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Inverse of `to_matrices`: pack the matrices into a contiguous tensor of the stored `shape`."""
        if self.role is Role.CONVOLUTION:
            return matrices[0].reshape(tuple(shape)).contiguous()
        if self.blocks:
            out = matrices[0].new_empty(tuple(shape))
            view = out.mT if self.orientation == "IO" else out
            for block, matrix in zip(self.blocks, matrices, strict=True):
                rows = _grouped(view, block.groups)[..., block.start : block.stop, :]
                rows.copy_(_grouped(matrix, block.groups))
            return out
        matrix = matrices[0].mT if self.orientation == "IO" else matrices[0]
        return matrix.contiguous()

    def matrix_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of `to_matrices`, without data."""
        return [tuple(m.shape) for m in self.to_matrices(torch.empty(tuple(shape), device="meta"))]


def _grouped(matrix: Tensor, groups: int) -> Tensor:
    """`*batch O I` -> `*batch groups O/groups I`, as a view (splitting an axis always is one)."""
    *batch, rows, cols = matrix.shape
    return matrix.view(*batch, groups, rows // groups, cols)


@dataclass(frozen=True, slots=True)
class RoleOverride:
    """A role, orientation or blocks set by the user for all tensors whose name matches."""

    match: str
    role: Role | None = None
    orientation: Orientation | None = None
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutMap:
    """Layouts of all tensors of a checkpoint, and its ties.

    `ties` maps a tied tensor's name to the name of the tensor it shares (the canonical one, merged once).
    `family` names the architecture family that was recognized, or None if only names and shapes decided.
    """

    tensors: Mapping[str, TensorLayout]
    ties: Mapping[str, str] = field(default_factory=dict)
    family: str | None = None
