"""The plan of a merge of adapters into an adapter: frozen, JSON-able, fingerprinted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.adapter import ModuleKind
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.writing.shards import Shard
from actmat.layout.types import Block
from actmat.plan.cost import BASELINE_BYTES
from actmat.plan.model import Action, InputSummary, MethodCall
from actmat.recipe import Recipe

__all__ = ["AdapterPlan", "ExtraPlan", "ModulePlan"]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What will happen to the delta of one module.

    Args:
        name: module in the model, as the adapters call it.
        kind, shape, kernel: see `checkpoints.adapter.AdapterModule`.
        ranks: rank in each expert; 0 where an expert leaves the module alone (a zero delta).
        full_rank: rank that holds every merged delta exactly; `rank`: what is written.
        call: the rule. `factored`: by its low-rank form; else on dense deltas, and `reason` says why.
        blocks: rows of packed maps that are merged apart.
        is_table: a table of vectors, of which only the norm is capped.
        a, b, bias: names of the output tensors.
        grams: per logical matrix (block), the key of each expert's Gram; empty for rules that need none.
        peak_bytes: memory of one worker on this module.
    """

    name: str
    kind: ModuleKind
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    full_rank: int
    rank: int
    action: Action
    reason: str
    call: MethodCall
    factored: bool
    a: str
    b: str
    kernel: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    bias: str | None = None
    is_table: bool = False
    grams: tuple[tuple[str, ...], ...] = ()
    peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        out: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "expert_ranks": list(self.ranks),
            "exact_rank": self.full_rank,
            "rank": self.rank,
            "action": self.action,
            "reason": self.reason,
            "factored": self.factored,
            "outputs": [n for n in (self.a, self.b, self.bias) if n is not None],
        }
        if self.blocks:
            out["blocks"] = {b.name: [b.start, b.stop] for b in self.blocks}
        return out | self.call.to_json()


@dataclass(frozen=True, slots=True)
class ExtraPlan:
    """A full tensor trained beside the factors (`modules_to_save`, a bias): the mean over the experts that have it."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str | None, ...]
    output: str
    reason: str
    weights: tuple[float, ...] | None = None
    action: Action = "average"
    peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "action": self.action,
            "reason": self.reason,
            "outputs": [self.output],
        }


@dataclass(frozen=True)
class AdapterPlan:
    """What one merge of adapters will do; `config` is the `adapter_config.json` of the output.

    `kept`: tensors of which no delta is written, and the recipe's pattern that says so.
    """

    recipe: Recipe
    experts: tuple[InputSummary, ...]
    modules: tuple[ModulePlan, ...]
    extras: tuple[ExtraPlan, ...]
    specs: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    config: Mapping[str, Any]
    dtype: str
    kept: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[Mapping[str, Any], ...] = ()
    statistics_identity: tuple[Any, ...] = ()

    @property
    def tensors(self) -> tuple[ModulePlan | ExtraPlan, ...]:
        """Everything that is merged, in the order of work."""
        return (*self.modules, *self.extras)

    @property
    def read_bytes(self) -> int:
        """Bytes of all adapters."""
        return sum(e.nbytes for e in self.experts)

    @property
    def write_bytes(self) -> int:
        """Bytes to write, header included."""
        return sum(s.size for s in self.shards)

    def peak_bytes(self, workers: int) -> int:
        """Estimated peak of memory with so many workers."""
        return BASELINE_BYTES + sum(sorted((t.peak_bytes for t in self.tensors), reverse=True)[:workers])

    def fingerprint(self) -> str:
        """Hash of everything that decides the output's bytes."""
        state = {
            "recipe": self.recipe.model_dump(mode="json", exclude={"out", "mute"}),
            "inputs": [[[f.path, f.size, f.modified_ns, f.change_ns, f.etag] for f in e.files] for e in self.experts],
            "plan": {k: v for k, v in self.to_json().items() if k != "recipe"},
        }
        if self.statistics_identity:
            state["statistics"] = self.statistics_identity
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data for `actmat plan --json`."""
        return {
            "actmat_plan": 1,
            "output": "adapter",
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True, exclude={"out"}),
            "experts": [e.to_json() for e in self.experts],
            **({"statistics": list(self.statistics)} if self.statistics else {}),
            "adapter_config": dict(self.config),
            "dtype": self.dtype,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "peak_bytes_one_worker": self.peak_bytes(1),
            "kept": dict(self.kept),
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "tensors": [t.to_json() for t in self.tensors],
        }


def factored_bytes(shape: tuple[int, ...], total_rank: int) -> int:
    """Memory of a factored merge: all factors, two bases, their products and the result, in float64."""
    *batch, rows, columns = shape
    return 8 * math.prod(batch) * (6 * (rows + columns) * total_rank + 12 * total_rank * total_rank)
