"""Items of a plan: one logical output each, with its kernel, reading, call, form and cost. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from actmat.checkpoints.base import TensorSpec
from actmat.experts.base import DeltaSource
from actmat.experts.lora.modules import ModuleKind
from actmat.layout.types import Block, TensorLayout
from actmat.methods.post import PostStep, Step, get_step
from actmat.methods.spaces import Space

Action = Literal["merge", "average", "copy", "tie"]
"""merge: by the method the recipe asks for; average: mean of the deltas, because the method does not apply there;
copy: the base's bytes; tie: the bytes of the tensor it is tied to."""

Form = Literal["dense", "factored"]
"""Input of the method: whole deltas, or the factors of low-rank ones."""

Kernel = Literal["copy", "dense", "combine", "factored", "extracted"]
"""Function of the engine that makes the output, a module of `engine.kernels`.

copy        the base's bytes
dense       a method on deltas that are formed
combine     a sum of deltas, or of tensors without a base, added up chunk by chunk
factored    a method on factors: of a module of adapters, or of a tensor whose deltas are all products
extracted   the merged delta of one of the others, written as factors
"""

Strategy = Literal["held", "each", "chunks", "combine"]
"""The way in which a method is given its deltas.

held         all of them, in memory
each         one at a time, each in the memory of the one before it
chunks       chunk by chunk, as often as the method asks; no delta is in memory as a whole
combine      as coefficients: one pass over chunks finds them, a second adds up and writes
"""


class Plain:
    """Data that is read back from JSON: an unknown field is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class Reading(Plain):
    """Reading of the deltas of one item.

    Args:
        strategy: see `Strategy`.
        base_held: whether the base is in memory as stored; else it is read chunk by chunk, with the deltas and again
            for the output.
    """

    strategy: Strategy
    base_held: bool = True

    def whole_deltas(self, n_experts: int) -> int:
        """Number of deltas that are in memory as a whole at a time."""
        return {"held": n_experts, "each": 1}.get(self.strategy, 0)

    def __str__(self) -> str:
        return f"{self.strategy}{'' if self.base_held else ', base streamed'}"


@dataclass(frozen=True, slots=True)
class FactorPlan(Plain):
    """Layout of a merged delta that is written as a pair of factors.

    Args:
        kind, kernel: see `experts.lora.modules.AdapterModule`.
        shape: of the tensor that the delta belongs to, as a model stores it; `tensor` is its name.
        transposed: whether it is stored as `I O`; `turned`: whether `B A` is, of stacked experts.
        ranks: rank in each expert; 0 if an expert has no delta for the module.
        exact_rank: rank that holds every merged delta exactly; `rank`: what is written.
        blocks: rows of packed maps that are merged one by one.
        grams: per logical matrix (block), the key of each expert's Gram; empty for methods that need none.
        bias: by which the additions to the layer's bias are merged: an average or a sum.
    """

    kind: ModuleKind
    tensor: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    exact_rank: int
    rank: int
    transposed: bool = False
    turned: bool = False
    kernel: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    grams: tuple[tuple[str, ...], ...] = ()
    bias: MethodCall | None = None


@dataclass(frozen=True, slots=True)
class Extraction(Plain):
    """Form in which an extracted adapter holds the merged delta of one tensor, see `plan.adapter.extraction`.

    Args:
        kind: as the factors of its best approximation, as the whole merged tensor, or not at all.
        module: that holds the tensor, by its name in memory.
        reason: in words.
        rank: of the factors; 0 for other kinds.
        transposed: whether the tensor is stored as `I O`.
        bias: whether it is the bias of a layer that is factored.
        tied: other names of the tensor in the base.
    """

    kind: Literal["factored", "saved", "left out"]
    module: str
    reason: str
    rank: int = 0
    transposed: bool = False
    bias: bool = False
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PostCall(Plain):
    """One step of post-processing with all its options."""

    name: str
    options: Mapping[str, Any]

    @property
    def step(self) -> PostStep:
        """Declaration of the step."""
        return get_step(self.name)


@dataclass(frozen=True, slots=True)
class MethodCall(Plain):
    """One method with all its options: `W* = W_0 + scale * D*`.

    Args:
        space: in which the method works, see `methods.spaces`.
        post: steps that change its result, in this order.
    """

    method: str
    options: Mapping[str, Any]
    scale: float = 1.0
    weights: tuple[float, ...] | None = None
    space: Space = "full"
    post: tuple[PostCall, ...] = ()

    @property
    def steps(self) -> list[Step]:
        """Declarations of the steps, with their options."""
        return [(p.step, p.options) for p in self.post]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        out: dict[str, Any] = {"method": self.method, "options": dict(self.options), "scale": self.scale}
        if self.weights is not None:
            out["weights"] = list(self.weights)
        if self.space != "full":
            out["space"] = self.space
        if self.post:
            out["post"] = [{"name": p.name, "options": dict(p.options)} for p in self.post]
        return out


@dataclass(frozen=True, slots=True)
class ItemCost(Plain):
    """Estimated cost of one item, for one worker.

    Args:
        read_bytes, write_bytes: traffic to and from storage.
        flops: leading term of the method's floating-point operations.
        host_bytes: peak memory on the host, see `plan.cost`.
        device_bytes: peak memory on the device that merges it, see `plan.placement`; 0: it is merged on the host.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    flops: int = 0
    host_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Item(Plain):
    """One logical output of a merge: a tensor of a model; a module, or a tensor trained in full, of an adapter.

    Args:
        name: of the tensor in the base and in the output, or of the module.
        shape: of the tensor as stored; `*batch O I` of a module's delta.
        layout: meaning of the tensor.
        action: see `Action`; `reason` says why, in words.
        kernel: see `Kernel`; `reading`: of its deltas, None if no dense delta is read from storage.
        outputs: written tensors: the tensor and those tied to it; A, B and bias of a module.
        call: the method, for `merge` and `average`.
        obeys_scale: the merged delta is proportional to the recipe's scale, as the method makes it.
        form: of the method's input.
        base_dtype: dtype of the base's tensor; empty if the output needs no base.
        sources: per expert, where its delta comes from (None: the expert lacks it); empty for `copy` and `tie`.
        twins: per expert, other names under which it stores the same tensor; their bytes must agree.
        tied_to: for `tie`, the tensor whose bytes it gets.
        factors: how A and B are written, for a module.
        cost: traffic, operations and memory.
        extraction: form of the tensor in an extracted adapter.
    """

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    action: Action
    reason: str
    outputs: tuple[TensorSpec, ...]
    call: MethodCall | None = None
    kernel: Kernel = "copy"
    reading: Reading | None = None
    obeys_scale: bool = False
    form: Form = "dense"
    base_dtype: str = ""
    sources: tuple[DeltaSource | None, ...] = ()
    twins: tuple[tuple[str, ...], ...] = ()
    tied_to: str | None = None
    factors: FactorPlan | None = None
    cost: ItemCost = ItemCost()
    extraction: Extraction | None = None

    @property
    def numel(self) -> int:
        """Number of entries of the delta."""
        return math.prod(self.shape)

    @property
    def pair(self) -> FactorPlan:
        """Layout of A and B; only for items that are modules."""
        assert self.factors is not None
        return self.factors

    @property
    def out_dtype(self) -> str:
        """Output dtype."""
        return self.base_dtype if not self.outputs else self.outputs[0].dtype

    @property
    def aliases(self) -> tuple[str, ...]:
        """Tied tensors that are written with the same bytes; of an adapter that is extracted, those of the base."""
        if self.extraction is not None:
            return self.extraction.tied
        return () if self.factors is not None else tuple(s.name for s in self.outputs[1:])

    @property
    def expert_dtypes(self) -> tuple[str, ...]:
        """dtype of the tensor in each expert."""
        return tuple("" if s is None else s.dtype for s in self.sources)

    @property
    def is_observed(self) -> bool:
        """True if a diagnosis measures it: everything but tensors that adapters trained in full."""
        return self.factors is not None or bool(self.base_dtype)

    @property
    def is_chunkable(self) -> bool:
        """True if every delta is read from storage, so that chunks of it cost no more than their bytes."""
        return all(s is not None and s.kind == "stored" for s in self.sources)
