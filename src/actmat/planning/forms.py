"""Forms in which an adapter holds the delta of a tensor: a pair of factors, a whole tensor, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from actmat.experts.lora.modules import ModuleKind
from actmat.layout.types import Block

__all__ = ["Extraction", "FactorPlan", "Plain"]


class Plain:
    """Data that is read back from JSON: a field that is not known is a mistake."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class FactorPlan(Plain):
    """Layout of a merged delta that is written as a pair of factors.

    Args:
        kind, kernel: see `experts.lora.modules.AdapterModule`.
        shape: of the tensor that the delta belongs to, as a model stores it; `tensor` is its name.
        transposed: whether it is stored as `I O`.
        ranks: rank in each expert; 0 where an expert has no delta for the module.
        exact_rank: rank that holds every merged delta exactly; `rank`: what is written.
        blocks: rows of packed maps that are merged one by one.
        grams: per logical matrix (block), the key of each expert's Gram; empty for methods that need none.
    """

    kind: ModuleKind
    tensor: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    exact_rank: int
    rank: int
    transposed: bool = False
    kernel: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    grams: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction(Plain):
    """Form in which an adapter that is extracted holds the merged delta of one tensor, see `plan.adapter.extraction`.

    Args:
        kind: as the factors of its best approximation, as the whole merged tensor, or not at all.
        module: that holds the tensor, by its name in memory.
        reason: why.
        rank: of the factors; `energy`: share of the squared norm that sets it, where no rank is given.
        transposed: whether the tensor is stored as `I O`.
        bias: whether it is the bias of a layer that is factored.
        tied: other names of the tensor in the base.
    """

    kind: Literal["factored", "saved", "left out"]
    module: str
    reason: str
    rank: int | None = None
    energy: float | None = None
    transposed: bool = False
    bias: bool = False
    tied: tuple[str, ...] = ()
