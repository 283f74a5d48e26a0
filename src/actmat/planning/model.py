"""The plan: what will happen to every output and why, decided from headers. Frozen, fingerprinted."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from actmat.checkpoints.base import FileIdentity, TensorSpec
from actmat.checkpoints.writing.shards import Shard, plan_shards
from actmat.errors import Note, RecipeError, format_size
from actmat.foreign import html_table, terminal
from actmat.methods import get_method
from actmat.planning.cost import BASELINE_BYTES, ITEM_BYTES, SOURCE_BYTES, nominal_seconds
from actmat.planning.item import Item, ItemCost, MethodCall
from actmat.recipe import Recipe

__all__ = ["InputSummary", "Item", "ItemCost", "MergePlan", "MethodCall", "count_actions"]


FORMAT = 1
"""Version of a plan's JSON; see docs/formats/plan.md."""


SHOWN_GROUPS = 25
"""Groups of items with one reason that a notebook shows of a plan."""


@dataclass(frozen=True, slots=True)
class InputSummary:
    """One input as the plan saw it.

    Args:
        commit: of a repository on the hub, whatever branch was requested.
        pinned: of a stack with parts on the hub: its text with their commits.
        models: locations of the models it is made of; those on the hub with their commits.
    """

    label: str
    location: str
    files: tuple[FileIdentity, ...]
    n_tensors: int
    nbytes: int
    kind: Literal["model", "adapter"] = "model"
    ignored: tuple[str, ...] = ()
    commit: str = ""
    pinned: str = ""
    models: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for manifests; times and etags stay out of the record, they belong to this machine."""
        return {
            "name": self.label,
            "location": self.location,
            "files": [{"path": f.path, "size": f.size} for f in self.files],
            "tensors": self.n_tensors,
            "bytes": self.nbytes,
            "ignored_tensors": list(self.ignored),
            **{n: v for n, v in (("commit", self.commit), ("pinned", self.pinned)) if v},
        }


@dataclass(frozen=True, repr=False)
class MergePlan:
    """Plan of one merge, for any inputs and any output.

    Args:
        recipe: of the merge.
        output: kind of the output.
        base: the checkpoint that deltas are added to, or are extracted from; None if only adapters are read.
        experts: in the recipe's order.
        items: in the order of reading.
        specs: tensors of the output in the order of writing; `max_shard_bytes`: size of its files.
        stems: prefix of the names of a component's tensors -> folder and name of its files; "": of all others.
        family: architecture that was recognized.
        metadata: texts in the headers of a model's files.
        adapter_config: `adapter_config.json` of an adapter.
        kept: tensors without a delta in an adapter -> the recipe's pattern that keeps them.
        notes: warnings, then decisions.
        configs: path in the output -> config that is written there in place of the base's.
        files: path in the output -> label of the expert whose file is there, in place of the base's.
        left_out: files of the inputs' folders that are not copied to the output, and why.
        device: names of the devices that merge items, such as `cuda:0,2`; `cpu`: the host does.
        device_memory: bytes that an item may take of one device; None: not known, or no device.
        versions: of the software that determines the output's bytes.
        statistics: per expert, a description of its statistics, with the hash of their content.
    """

    recipe: Recipe
    output: Literal["model", "adapter"]
    base: InputSummary | None
    experts: tuple[InputSummary, ...]
    items: tuple[Item, ...]
    specs: tuple[TensorSpec, ...]
    max_shard_bytes: int
    stems: Mapping[str, str]
    family: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    adapter_config: Mapping[str, Any] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    device_memory: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    statistics: tuple[Mapping[str, Any], ...] = ()

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {a}" for a, n in count_actions(self.items).items() if n)
        of = f" of {self.base.location}" if self.base is not None else ""
        sizes = f"read {format_size(self.read_bytes)}, write {format_size(self.write_bytes)}"
        what = f"{self.recipe.method} over {len(self.experts)} experts{of}"
        return terminal(f"<MergePlan: {what}; {len(self.items)} items: {counts}; {sizes}>")

    def _repr_html_(self) -> str:
        groups = Counter((i.action, i.reason) for i in self.items)
        rows = [(n, action, reason) for (action, reason), n in groups.most_common(SHOWN_GROUPS)]
        more = [("", "...", f"{len(groups) - SHOWN_GROUPS} more groups")] if len(groups) > SHOWN_GROUPS else []
        return str(html_table(repr(self), ("items", "action", "why"), [*rows, *more]))

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The files to write."""
        groups: dict[str, list[TensorSpec]] = {prefix: [] for prefix in self.stems}
        for spec in self.specs:
            groups[max((p for p in groups if spec.name.startswith(p)), key=len)].append(spec)
        most, header = self.max_shard_bytes, {"": self.metadata}
        shards = [plan_shards(g, most, stem=self.stems[p], metadata=header.get(p), prefix=p) for p, g in groups.items()]
        return tuple(shard for of_part in shards for shard in of_part)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Item]:
        """Items by name."""
        return {item.name: item for item in self.items}

    @property
    def modules(self) -> tuple[Item, ...]:
        """Items of a merge of adapters that are written as factors."""
        return tuple(i for i in self.items if i.is_module)

    @property
    def is_extracted(self) -> bool:
        """True if an adapter is extracted from a merge into a base; its tensors are known after the merge."""
        return self.output == "adapter" and self.base is not None

    @property
    def by_inputs(self) -> bool:
        """True if a method merges by statistics of the experts' inputs."""
        return bool(self.statistics) and any(i.call and get_method(i.call.method).needs_statistics for i in self.items)

    @property
    def inputs(self) -> tuple[InputSummary, ...]:
        """Base, if there is one, and experts."""
        return (*((self.base,) if self.base is not None else ()), *self.experts)

    @property
    def read_bytes(self) -> int:
        """Bytes to read from all inputs."""
        if self.output == "adapter" and not self.is_extracted:  # adapters are read whole, to be hashed
            return sum(e.nbytes for e in self.experts)
        return sum(i.cost.read_bytes for i in self.items)

    @property
    def write_bytes(self) -> int:
        """Bytes to write, headers included."""
        return sum(s.size for s in self.shards)

    @property
    def seconds(self) -> float:
        """Time of one worker on a typical core, from shapes and bytes; a guide, not a measurement."""
        return sum(map(nominal_seconds, self.items))

    @property
    def process_bytes(self) -> int:
        """Memory of a run in addition to the items in work: interpreter and libraries, plan, records."""
        return BASELINE_BYTES + len(self.items) * (ITEM_BYTES + SOURCE_BYTES * len(self.experts))

    def peak_bytes(self, workers: int) -> int:
        """Estimated peak of anonymous memory with this many workers: the process + the largest items."""
        largest = sorted((i.cost.host_bytes for i in self.items), reverse=True)[:workers]
        return self.process_bytes + sum(largest)

    @property
    def on_device(self) -> tuple[Item, ...]:
        """Items that a device merges."""
        return tuple(i for i in self.items if i.cost.device_bytes)

    def fingerprint(self) -> str:
        """Hash of everything that decides the output's bytes: recipe, inputs as they are now, versions, device."""
        files = [[[f.path, f.size, f.modified_ns, f.change_ns, f.etag] for f in i.files] for i in self.inputs]
        state = {
            "recipe": self.recipe.model_dump(mode="json", exclude={"out", "mute"}),
            "inputs": files,
            "output": [self.output, self.adapter_config, dict(self.metadata)],
            "device": self.device.partition(":")[0],
            "versions": dict(self.versions),
            "statistics": [dict(s) for s in self.statistics],
        }
        content = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
        content.update(_ITEMS.dump_json(self.items))
        return content.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the fields at their default."""
        fields: dict[str, Any] = PLAN.dump_python(self, mode="json", exclude_defaults=True)
        return {"actmat_plan": FORMAT, **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MergePlan:
        """The plan that `to_json` wrote.

        Raises:
            RecipeError: not a plan of this version, or damaged.
        """
        if (layout := data.get("actmat_plan")) != FORMAT:
            raise RecipeError(f"expected a plan of layout {FORMAT}, found {layout!r}")
        try:
            return PLAN.validate_python({k: v for k, v in data.items() if k != "actmat_plan"})
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)]
            raise RecipeError("The plan is damaged.", problems) from None


PLAN = TypeAdapter(MergePlan)
"""Plans as plain data: fields of JSON and their types."""
_ITEMS = TypeAdapter(tuple[Item, ...])


def count_actions(items: Iterable[Item]) -> dict[str, int]:
    """Number of items per action, in the order of `Action`."""
    out = dict.fromkeys(("merge", "average", "copy", "tie"), 0)
    for item in items:
        out[item.action] += 1
    return out
