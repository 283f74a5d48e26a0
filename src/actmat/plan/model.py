"""The plan: what will happen to every tensor and why, before anything is read. Frozen, JSON-able, fingerprinted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from actmat.checkpoints.base import FileIdentity, TensorSpec
from actmat.checkpoints.writing.shards import Shard
from actmat.layout.types import TensorLayout
from actmat.plan.cost import BASELINE_BYTES
from actmat.recipe import Recipe

__all__ = ["Action", "InputSummary", "MergePlan", "MethodCall", "TensorPlan"]

Action = Literal["merge", "average", "copy", "tie"]
"""merge: by the rule the recipe asks for; average: mean of the deltas, because the rule does not apply there;
copy: the base's bytes; tie: the bytes of the tensor it is tied to."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One rule with all its options: `W* = W_0 + scale * D*`."""

    method: str
    options: Mapping[str, Any]
    scale: float = 1.0
    weights: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        out: dict[str, Any] = {"method": self.method, "options": dict(self.options), "scale": self.scale}
        return out | ({"weights": list(self.weights)} if self.weights is not None else {})


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What will happen to one output tensor.

    Args:
        name: name in the base and in the output.
        shape, base_dtype, out_dtype: of the tensor.
        layout: its meaning.
        action: see `Action`.
        reason: why, in words.
        call: the rule, for `merge` and `average`.
        sources: the tensor's name in each expert, for `merge` and `average`.
        expert_dtypes: its dtype in each expert.
        aliases: tied tensors written with the same bytes.
        twins: other names under which each expert stores the same tensor; their bytes must agree.
        tied_to: for `tie`, the tensor whose bytes it gets.
        factored: all experts are adapters, and the rule works on their factors.
        pool: tensors with the same non-empty pool are merged as one matrix, their rows one below the other.
        read_bytes, write_bytes: traffic.
        peak_bytes: memory of one worker on this tensor, see `plan.cost`.
    """

    name: str
    shape: tuple[int, ...]
    base_dtype: str
    out_dtype: str
    layout: TensorLayout
    action: Action
    reason: str
    call: MethodCall | None = None
    sources: tuple[str, ...] = ()
    expert_dtypes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    twins: tuple[tuple[str, ...], ...] = ()
    tied_to: str | None = None
    factored: bool = False
    pool: str = ""
    read_bytes: int = 0
    write_bytes: int = 0
    peak_bytes: int = 0

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain data, one row of `actmat plan --json`."""
        out: dict[str, Any] = {
            "name": self.name,
            "shape": list(self.shape),
            "role": str(self.layout.role),
            "action": self.action,
            "reason": self.reason,
            "dtype": self.base_dtype,
            "out_dtype": self.out_dtype,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "peak_bytes": self.peak_bytes,
        }
        if self.layout.blocks:
            out["blocks"] = {b.name: [b.start, b.stop] for b in self.layout.blocks}
        if self.layout.orientation != "OI":
            out["orientation"] = self.layout.orientation
        if self.call is not None:
            out |= self.call.to_json()
            out["sources"] = list(self.sources)
            out["expert_dtypes"] = list(self.expert_dtypes)
        if self.factored:
            out["factored"] = True
        if self.tied_to is not None:
            out["tied_to"] = self.tied_to
        if self.pool:
            out["pool"] = self.pool
        return out


@dataclass(frozen=True, slots=True)
class InputSummary:
    """One input as the plan saw it."""

    label: str
    location: str
    files: tuple[FileIdentity, ...]
    n_tensors: int
    nbytes: int
    ignored: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; times and etags stay out of the record, they belong to this machine."""
        return {
            "name": self.label,
            "location": self.location,
            "files": [{"path": f.path, "size": f.size} for f in self.files],
            "tensors": self.n_tensors,
            "bytes": self.nbytes,
            "ignored_tensors": list(self.ignored),
        }


@dataclass(frozen=True)
class MergePlan:
    """What one merge will do. `tensors` are in the order of reading; `specs` and `shards` describe the output."""

    recipe: Recipe
    base: InputSummary
    experts: tuple[InputSummary, ...]
    tensors: tuple[TensorPlan, ...]
    specs: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    family: str | None = None
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[Mapping[str, Any], ...] = ()
    statistics_identity: tuple[Any, ...] = ()

    @property
    def read_bytes(self) -> int:
        """Bytes to read from all inputs."""
        return sum(t.read_bytes for t in self.tensors)

    @property
    def write_bytes(self) -> int:
        """Bytes to write, headers included."""
        return sum(s.size for s in self.shards)

    def peak_bytes(self, workers: int) -> int:
        """Estimated peak of anonymous memory with so many workers: interpreter and libraries + the largest items."""
        largest = sorted((t.peak_bytes for t in self.tensors), reverse=True)[:workers]
        return BASELINE_BYTES + sum(largest)

    def fingerprint(self) -> str:
        """Hash of everything that decides the output's bytes: recipe, inputs as they are now, versions, device."""
        state = {
            "recipe": self.recipe.model_dump(mode="json", exclude={"out", "mute"}),
            "inputs": [
                [[f.path, f.size, f.modified_ns, f.change_ns, f.etag] for f in i.files]
                for i in (self.base, *self.experts)
            ],
            "tensors": [t.to_json() for t in self.tensors],
            "device": self.device.partition(":")[0],
            "versions": dict(self.versions),
        }
        if self.statistics_identity:
            state["statistics"] = self.statistics_identity
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data for `actmat plan --json`."""
        return {
            "actmat_plan": 1,
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True),
            "family": self.family,
            "base": self.base.to_json(),
            "experts": [e.to_json() for e in self.experts],
            **({"statistics": list(self.statistics)} if self.statistics else {}),
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "peak_bytes_one_worker": self.peak_bytes(1),
            "peak_bytes_two_workers": self.peak_bytes(2),
            "shards": {s.file: s.size for s in self.shards},
            "notes": list(self.notes),
            "tensors": [t.to_json() for t in self.tensors],
        }


def count_actions(tensors: Sequence[TensorPlan]) -> dict[str, int]:
    """How many tensors per action, in the order of `Action`."""
    out = dict.fromkeys(("merge", "average", "copy", "tie"), 0)
    for tensor in tensors:
        out[tensor.action] += 1
    return out
