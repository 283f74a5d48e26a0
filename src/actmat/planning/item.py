"""Items of a plan: a target, the method that merges it, the reading of its deltas, and its writing. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actmat.checkpoints.base import TensorSpec
from actmat.experts.deltas import DeltaSource
from actmat.experts.lora.modules import ModuleKind
from actmat.layout.types import Block, TensorLayout
from actmat.methods.post import Step
from actmat.methods.spaces import Space

Action = Literal["merge", "average", "copy", "tie"]
"""merge: by the method the recipe asks for; average: mean of the deltas, because the method does not apply there;
copy: the base's bytes; tie: the bytes of the tensor it is tied to."""

Strategy = Literal["held", "each", "chunks", "combine", "factors"]
"""The way in which a method is given its deltas.

held         all of them, in memory
each         one at a time, each in the memory of the one before it
chunks       chunk by chunk, as often as the method asks; no delta is in memory as a whole
combine      as coefficients: one pass over chunks finds them, a second adds up and writes
factors      as pairs of factors, of deltas that are all products
"""

WriteKind = Literal["sum", "factors", "svd", "mean", "nothing"]
"""The form in which a target is written.

sum          the base plus the merged delta; the base's bytes where nothing is merged
factors      the merged delta as factors, cut from those it was merged by
svd          the merged delta as the factors of its best approximation
mean         the mean of a tensor that adapters trained in full, without a base
nothing      not at all: of an extracted adapter, whose delta is only measured; of a tie, which its tensor writes
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of the deltas of one item.

    Args:
        strategy: see `Strategy`.
        base_held: whether the base is in memory as stored; else it is read chunk by chunk, with the deltas and again
            for the output.
        batched: whether a stack of experts is one batch for the method, and dense deltas are formed in float64 before
            they are rounded, as for modules of adapters without a base; else one matrix after the other, in the
            compute dtype. Both are right; the last bits differ.
    """

    strategy: Strategy
    base_held: bool = True
    batched: bool = False

    def whole_deltas(self, n_experts: int) -> int:
        """Number of deltas that are in memory as a whole at a time."""
        return {"held": n_experts, "each": 1}.get(self.strategy, 0)

    def __str__(self) -> str:
        return f"{self.strategy}{'' if self.base_held else ', base streamed'}"


@dataclass(frozen=True, slots=True)
class ModuleForm:
    """Factors of a module of adapters, by which a target is known without a base.

    Args:
        name: of the module.
        kind, kernel: see `experts.lora.modules.AdapterModule`.
        shape: `*batch O I` of the delta.
        ranks: rank in each expert; 0 if an expert has no delta for the module.
        transposed: whether the model stores the tensor as `I O`; `turned`: whether `B A` is, of stacked experts.
        blocks: rows of packed maps that are merged one by one.
    """

    name: str
    kind: ModuleKind
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    transposed: bool = False
    turned: bool = False
    kernel: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to be made: one that the base stores, or one that adapters imply.

    Args:
        spec: of the tensor as a model stores it.
        layout: its meaning.
        tied: other names of the base with the same bytes; of a tie, the tensor that it is tied to.
        sources: per expert, where its delta comes from (None: the expert lacks it); empty if nothing is merged.
        twins: per expert, other names under which it stores the same tensor; their bytes must agree.
        measured: per expert, the name of the tensor in its statistics; empty: that of its source.
        module: its factors, if adapters imply it.
    """

    spec: TensorSpec
    layout: TensorLayout
    tied: tuple[str, ...] = ()
    sources: tuple[DeltaSource | None, ...] = ()
    twins: tuple[tuple[str, ...], ...] = ()
    measured: tuple[str, ...] = ()
    module: ModuleForm | None = None

    @property
    def name(self) -> str:
        """Name of the module, or of the tensor."""
        return self.spec.name if self.module is None else self.module.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the delta: that of the tensor, `*batch O I` of a module."""
        return self.spec.shape if self.module is None else self.module.shape


@dataclass(frozen=True, slots=True)
class MethodCall:
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
    post: tuple[Step, ...] = ()

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
class Write:
    """The form of a target in the output.

    Args:
        kind: see `WriteKind`.
        outputs: written tensors: the tensor and those tied to it; A, B and bias of a module.
        module: that holds the tensor, of an adapter that is extracted; `why`: the reason for its form there.
        rank: of the factors; `exact_rank`: rank that holds every merged delta of a module exactly.
        bias: by which the additions to the bias of a module's layer are merged: an average or a sum.
    """

    kind: WriteKind
    outputs: tuple[TensorSpec, ...] = ()
    module: str = ""
    why: str = ""
    rank: int = 0
    exact_rank: int = 0
    bias: MethodCall | None = None


@dataclass(frozen=True, slots=True)
class ItemCost:
    """Estimated cost of one item, for one worker.

    Args:
        read_bytes, write_bytes: traffic to and from storage.
        host_bytes: peak memory on the host, see `planning.cost`.
        device_bytes: peak memory on the device that merges it, see `planning.work`; 0: it is merged on the host.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One output of a merge: a tensor of a model; a module, or a tensor trained in full, of an adapter.

    Args:
        target: the tensor to be made.
        action: see `Action`; `reason` says why, in words.
        write: what it becomes.
        call: the method, for `merge` and `average`.
        reading: of its deltas; None if none is read.
        cost: traffic and memory.
    """

    target: Target
    action: Action
    reason: str
    write: Write
    call: MethodCall | None = None
    reading: Reading | None = None
    cost: ItemCost = ItemCost()

    @property
    def name(self) -> str:
        """Name of the tensor in the base and in the output, or of the module."""
        return self.target.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the delta, see `Target`."""
        return self.target.shape

    @property
    def numel(self) -> int:
        """Number of entries of the delta."""
        return math.prod(self.shape)

    @property
    def layout(self) -> TensorLayout:
        """Meaning of the tensor."""
        return self.target.layout

    @property
    def sources(self) -> tuple[DeltaSource | None, ...]:
        """Sources of the experts' deltas, see `Target`."""
        return self.target.sources

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Written tensors."""
        return self.write.outputs

    @property
    def module(self) -> ModuleForm:
        """Factors; only for items that are modules."""
        assert self.target.module is not None
        return self.target.module

    @property
    def is_module(self) -> bool:
        """True for a module of adapters that are merged without a base."""
        return self.target.module is not None

    @property
    def is_extracted(self) -> bool:
        """True for a tensor of an adapter that is extracted from a merge into a base."""
        return bool(self.write.module)

    @property
    def is_factored(self) -> bool:
        """True if the method works on factors, not on whole deltas."""
        return self.reading is not None and self.reading.strategy == "factors"

    @property
    def has_base(self) -> bool:
        """True if the base stores the tensor."""
        return self.write.kind not in ("factors", "mean")

    @property
    def base_dtype(self) -> str:
        """dtype of the base's tensor; empty if the output needs no base."""
        return self.target.spec.dtype if self.has_base else ""

    @property
    def out_dtype(self) -> str:
        """Output dtype."""
        return self.outputs[0].dtype if self.outputs else self.base_dtype

    @property
    def tied_to(self) -> str | None:
        """Name of the tensor whose bytes a tie gets; None for any other item."""
        return self.target.tied[0] if self.action == "tie" else None

    @property
    def expert_dtypes(self) -> tuple[str, ...]:
        """dtype of the tensor in each expert."""
        return tuple("" if s is None else s.dtype for s in self.sources)

    @property
    def is_observed(self) -> bool:
        """True if a diagnosis measures it: matrices, and modules of adapters."""
        return self.is_module or (self.has_base and self.layout.role.is_matrix)

    @property
    def is_chunkable(self) -> bool:
        """True if every delta is read from storage, so that chunks of it cost no more than their bytes."""
        return all(s is not None and s.kind == "stored" for s in self.sources)
