"""Statistics of the experts in a plan: which Gram belongs to which matrix, and why a tensor has none.

Statistics name tensors as the expert's own checkpoint does; for an adapter, as the base it was measured on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.errors import StatisticsError
from actmat.experts.lora.modules import AdapterModule
from actmat.layout.types import Block, Role, TensorLayout
from actmat.methods import MergeMethod, get_method
from actmat.planning.choose import Chooser, Decision
from actmat.planning.item import Item
from actmat.planning.regions import Region, cut
from actmat.recipe import Recipe
from actmat.statistics.header import amount, describe
from actmat.statistics.store import Statistics, open_statistics


@dataclass(frozen=True)
class ExpertStatistics:
    """The open statistics of every expert; None for those without."""

    labels: tuple[str, ...]
    files: tuple[Statistics | None, ...]

    @property
    def any(self) -> bool:
        """True if any expert has statistics."""
        return any(f is not None for f in self.files)

    @property
    def complete(self) -> tuple[Statistics, ...]:
        """The files, where every expert has one."""
        return tuple(f for f in self.files if f is not None)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds that every expert has."""
        found = [f.header.kinds if f is not None else frozenset[str]() for f in self.files]
        return frozenset.intersection(*found) if found else frozenset()

    def to_json(self) -> list[dict[str, Any]]:
        """For plans and manifests: what each expert was measured on."""
        pairs = zip(self.labels, self.files, strict=True)
        return [{"expert": n, "location": f.location, **describe(f.header)} for n, f in pairs if f is not None]

    @classmethod
    def none(cls, labels: Sequence[str]) -> ExpertStatistics:
        """No statistics for any of these experts."""
        return cls(tuple(labels), (None,) * len(labels))

    def kind_problems(self, adapted: Sequence[bool]) -> list[str]:
        """Problems of statistics of adapters that are given for full models, and the other way round."""
        problems = []
        for label, file, is_adapter in zip(self.labels, self.files, adapted, strict=True):
            if file is None or (file.header.model.adapter is not None) == is_adapter:
                continue
            of, want = ("a full model", "an adapter") if is_adapter else ("a model with an adapter", "a full model")
            problems.append(
                f"expert '{label}' is {want}, but its statistics ({file.location}) were measured on {of} "
                f"({file.header.model.location}); collect them on this expert"
            )
        return problems

    def gram_keys(self, item: Item, region: Region, k: int) -> list[str | None]:
        """Per expert, the key of the Gram that matrix `k` of a region reads; None if none of its tokens reached it."""
        if item.factors is not None:
            return list(item.factors.grams[k])
        pairs = zip(self.files, item.sources, strict=True)
        return [
            None if f is None or s is None else gram_key(f, s.name, item.shape, item.layout, region, k)
            for f, s in pairs
        ]

    def notes_on(self, items: Sequence[Item]) -> list[str]:
        """Notes for the plan: what was measured, or that nothing uses it."""
        if not self.any:
            return []
        methods = {i.call.method for i in items if i.call is not None}
        if not any(get_method(m).needs_statistics for m in methods):
            return ["statistics are given, but no chosen method uses them"]
        return [
            f"statistics of '{label}': {amount(file.header)}"
            for label, file in zip(self.labels, self.files, strict=True)
            if file is not None
        ]

    def identity(self) -> list[Any]:
        """For fingerprints: the state of every file."""
        found = [f.identity() if f is not None else () for f in self.files]
        return [[[i.path, i.size, i.modified_ns, i.change_ns] for i in files] for files in found]


@contextlib.contextmanager
def opened_statistics(recipe: Recipe) -> Iterator[ExpertStatistics]:
    """Open the statistics that the recipe names; headers only.

    Raises:
        StatisticsError: some cannot be used; lists all problems.
    """
    with contextlib.ExitStack() as stack:
        files: list[Statistics | None] = []
        problems: list[str] = []
        for expert in recipe.experts:
            try:
                files.append(stack.enter_context(open_statistics(expert.statistics)) if expert.statistics else None)
            except StatisticsError as error:
                problems += [f"expert '{expert.label}': {p}" for p in error.problems]
        if problems:
            raise StatisticsError("The statistics cannot be used.", problems)
        yield ExpertStatistics(recipe.labels, tuple(files))


def declared_kinds(recipe: Recipe) -> frozenset[str]:
    """Kinds that may exist, before a file is opened: all if every expert names statistics."""
    return frozenset({"gram", "fisher"}) if all(e.statistics for e in recipe.experts) else frozenset()


def with_statistics(
    decision: Decision,
    spec: TensorSpec,
    sources: Sequence[str | None],
    statistics: ExpertStatistics,
    chooser: Chooser,
    problems: list[str],
) -> Decision:
    """The decision, or the average if its method needs statistics that an expert lacks for this tensor."""
    method = get_method(decision.call.method) if decision.call else None
    if method is None or not method.needs_statistics or not statistics.kinds.issuperset(method.needs_statistics):
        return decision  # kinds that an expert lacks are a problem of the whole recipe, noted by the chooser
    rows = 0
    for label, file, source in zip(statistics.labels, statistics.complete, sources, strict=True):
        if source is None:
            return decision  # missing in the expert: alignment says so
        why = _why_not(file, source, spec, decision.layout, method)
        if isinstance(why, _Misfit):
            problems.append(f"expert '{label}': {why.text}")
            return decision
        if isinstance(why, str):
            reason = f"{decision.layout.reason}: no statistics in expert '{label}' ({why}): mean of the deltas"
            return Decision("average", reason, decision.layout, chooser.average(spec.name))
        rows += why
    if rows == 0:
        reason = f"{decision.layout.reason}: no token of any expert's data reached it: mean of the deltas"
        return Decision("average", reason, decision.layout, chooser.average(spec.name))
    return decision


@dataclass(frozen=True)
class _Misfit:
    text: str


def _why_not(
    file: Statistics, source: str, spec: TensorSpec, layout: TensorLayout, method: MergeMethod
) -> str | int | _Misfit:
    """Number of measured rows for the tensor, or the reason why there are none, or a misfit of the file."""
    if "fisher" in method.needs_statistics:
        stored = file.specs.get(f"fisher.{source}")
        if stored is None:
            return "its Fisher was not measured"
        if stored.shape != spec.shape:
            return _Misfit(f"the Fisher of '{source}' in {file.location} is {stored.shape}, the tensor {spec.shape}")
        return 1
    total = 0
    for region in cut(spec.shape, layout, method.acts_on):
        for k, (*_, width) in enumerate(region.layout.matrix_shapes(region.shape)):
            key = gram_key(file, source, spec.shape, layout, region, k)
            if key is None:
                if layout.role is Role.STACKED_EXPERTS and source in file.header.places:
                    continue  # no token was routed to this one
                return file.why_absent(source)
            info = file.header.grams[key]
            if info.groups > 1:
                return f"a convolution in {info.groups} groups, each with a Gram of its own"
            if info.width != width:
                return _Misfit(
                    f"the Gram of '{source}' in {file.location} is of {info.width} inputs, the tensor has {width}; are "
                    "these the statistics of this model?"
                )
            total += info.rows
    return total


def gram_key(
    file: Statistics, source: str, shape: Sequence[int], layout: TensorLayout, region: Region, k: int
) -> str | None:
    """The Gram that one logical matrix of a stored tensor reads."""
    expert = None
    first = region.start
    if layout.role is Role.STACKED_EXPERTS and len(shape) == 3:
        expert, first = divmod(region.start, shape[1] * shape[2])
    if region.layout.blocks:
        block = region.layout.blocks[k]
        rows = (block.start, block.stop) if block.groups == 1 else None
    elif region.layout.orientation == "OI":
        columns = max(math.prod(region.shape[1:]), 1)
        rows = (first // columns, first // columns + region.shape[0])
    else:
        rows = (0, region.shape[-1])
    return file.find(source, expert=expert, rows=rows)


def module_statistics(
    decision: Decision,
    tensor: str,
    module: AdapterModule,
    blocks: Sequence[Block],
    statistics: ExpertStatistics,
    chooser: Chooser,
    problems: list[str],
) -> tuple[Decision, tuple[tuple[str, ...], ...]]:
    """`with_statistics` for a module of adapters merged without a base, and the keys of its Grams per block.

    Args:
        decision: made without statistics.
        tensor: the module's weight as the model calls it in memory.
        module: one expert's pair of factors, for shapes.
        blocks: rows of a packed map that are merged separately; empty: one map.
        statistics, chooser, problems: see `with_statistics`.
    """
    method = get_method(decision.call.method) if decision.call else None
    if method is None or not method.needs_statistics or not statistics.kinds.issuperset(method.needs_statistics):
        return decision, ()

    def averaged(label: str, why: str) -> tuple[Decision, tuple[tuple[str, ...], ...]]:
        reason = f"{decision.layout.reason}: no statistics in expert '{label}' ({why}): mean of the deltas"
        return Decision("average", reason, decision.layout, chooser.average(tensor)), ()

    candidates = (tensor, f"{tensor.removesuffix('.weight')}.in_proj_weight")
    ranges = [(b.start, b.stop) if b.groups == 1 else None for b in blocks] or [(0, module.shape[-2])]
    keys: list[list[str]] = [[] for _ in ranges]
    for label, file in zip(statistics.labels, statistics.complete, strict=True):
        if method.acts_on != "matrix":
            return averaged(label, "the Fisher is of full tensors; merge into a model, --to model")
        if len(module.shape) > 2:
            return averaged(label, "a stack of experts, whose factors have no Gram each")
        disk = next((d for d, memory in file.header.memory.items() if memory in candidates), None)
        source = disk or next((n for n in candidates if n in file.header.places), tensor)
        for k, rows in enumerate(ranges):
            key = file.find(source, rows=rows)
            if key is None:
                return averaged(label, file.why_absent(source))
            if file.header.grams[key].groups > 1:
                return averaged(label, "a convolution in groups, each with a Gram of its own")
            width = file.header.grams[key].width
            if width != module.shape[-1]:
                problems.append(
                    f"expert '{label}': the Gram of '{source}' in {file.location} is of {width} inputs, module "
                    f"'{module.name}' has {module.shape[-1]}; are these the statistics of this model?"
                )
            keys[k].append(key)
    return decision, tuple(map(tuple, keys))
