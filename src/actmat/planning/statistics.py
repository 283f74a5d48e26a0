"""Statistics of the experts in a plan: which Gram belongs to which matrix, and why a tensor has none.

Statistics name tensors as the expert's own checkpoint does; for an adapter, as the base it was measured on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.errors import StatisticsError
from actmat.layout.types import Role
from actmat.methods import MergeMethod, get_method
from actmat.planning.choose import Chooser, Decision
from actmat.planning.item import Item, Target
from actmat.planning.regions import Region
from actmat.recipe import Recipe
from actmat.statistics.header import describe, describe_amount
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
        of_files = [f.header.kinds if f is not None else frozenset[str]() for f in self.files]
        return frozenset.intersection(*of_files) if of_files else frozenset()

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
        names = measured_names(item.target)
        pairs = zip(self.files, names, strict=True)
        return [None if f is None or n is None else gram_key(f, n, item.target, region, k) for f, n in pairs]

    def notes_on(self, items: Sequence[Item]) -> list[str]:
        """Notes for the plan: what was measured, or that nothing uses it."""
        if not self.any:
            return []
        methods = {i.call.method for i in items if i.call is not None}
        if not any(get_method(m).needs_statistics for m in methods):
            return ["statistics are given, but no chosen method uses them"]
        return [
            f"statistics of '{label}': {describe_amount(file.header)}"
            for label, file in zip(self.labels, self.files, strict=True)
            if file is not None
        ]


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


def measured_names(target: Target) -> Sequence[str | None]:
    """Per expert, the name of a target in its statistics."""
    return target.measured or [None if s is None else s.name for s in target.sources]


def with_statistics(
    decision: Decision,
    target: Target,
    regions: Sequence[Region],
    statistics: ExpertStatistics,
    chooser: Chooser,
    problems: list[str],
) -> Decision:
    """The decision, or the average if its method needs statistics that an expert lacks for this target.

    Args:
        decision: made without statistics.
        target: with the names that its statistics have in each expert's file.
        regions: that a matrix method is called on.
        statistics: of the experts.
        chooser: of averages.
        problems: receives those of files that do not fit.
    """
    assert decision.call is not None, "a method that needs statistics, which all experts have"
    method, rows, name = get_method(decision.call.method), 0, target.spec.name
    for label, file, source in zip(statistics.labels, statistics.complete, measured_names(target), strict=True):
        if source is None:
            return decision  # missing in the expert: alignment says so
        number, why = _count_rows(file, source, target, regions, method, label, problems)
        if why:
            reason = f"{decision.layout.reason}: no statistics in expert '{label}' ({why}): mean of the deltas"
            return Decision("average", reason, decision.layout, chooser.average(name))
        rows += number
    if rows == 0:
        reason = f"{decision.layout.reason}: no token of any expert's data reached it: mean of the deltas"
        return Decision("average", reason, decision.layout, chooser.average(name))
    return decision


def uses_statistics(decision: Decision, statistics: ExpertStatistics) -> bool:
    """True if the method of a decision needs statistics, and every expert has some of these kinds."""
    needed = get_method(decision.call.method).needs_statistics if decision.call else ()
    return bool(needed) and statistics.kinds.issuperset(needed)


def with_module_names(target: Target, statistics: ExpertStatistics) -> Target:
    """A module of adapters with the names that its tensor has in the statistics of each expert.

    Statistics call it as the measured model's checkpoint does, which may pack it with others.
    """
    name = target.spec.name
    candidates = (name, f"{name.removesuffix('.weight')}.in_proj_weight")
    names = []
    for file in statistics.complete:
        disk = next((d for d, memory in file.header.memory.items() if memory in candidates), None)
        names.append(disk or next((n for n in candidates if n in file.header.places), name))
    return dataclasses.replace(target, measured=tuple(names))


def _count_rows(
    file: Statistics,
    source: str,
    target: Target,
    regions: Sequence[Region],
    method: MergeMethod,
    label: str,
    problems: list[str],
) -> tuple[int, str]:
    """Number of measured rows for a target, and the reason why there are none; misfits go to the problems."""
    if "fisher" in method.needs_statistics:
        return _count_fisher(file, source, target, label, problems)
    if target.module is not None and len(target.shape) > 2:
        return 0, "a stack of experts, whose factors have no Gram each"
    total = 0
    for region in regions:
        for k, (*_, width) in enumerate(region.layout.matrix_shapes(region.shape)):
            key = gram_key(file, source, target, region, k)
            if key is None:
                if target.layout.role is Role.STACKED_EXPERTS and source in file.header.places:
                    continue  # no token was routed to this one
                return 0, file.header.absent.get(source, "its input was not measured")
            info = file.header.grams[key]
            if info.groups > 1:
                return 0, f"a convolution in {info.groups} groups, each with a Gram of its own"
            if info.width != width:
                problems.append(
                    f"expert '{label}': the Gram of '{source}' in {file.location} is of {info.width} inputs, "
                    f"'{target.name}' has {width}; are these the statistics of this model?"
                )
                return 1, ""
            total += info.rows
    return total, ""


def _count_fisher(file: Statistics, source: str, target: Target, label: str, problems: list[str]) -> tuple[int, str]:
    """1 if the Fisher of a target was measured, else the reason why not."""
    if target.module is not None:
        return 0, "the Fisher is of full tensors; merge into a model, --to model"
    stored = file.specs.get(f"fisher.{source}")
    if stored is None:
        return 0, "its Fisher was not measured"
    if stored.shape != target.shape:
        problems.append(
            f"expert '{label}': the Fisher of '{source}' in {file.location} is {stored.shape}, the tensor "
            f"{target.shape}"
        )
    return 1, ""


def gram_key(file: Statistics, source: str, target: Target, region: Region, k: int) -> str | None:
    """The Gram that one logical matrix of a target reads."""
    expert, first, shape = None, region.start, target.shape
    if target.module is None and target.layout.role is Role.STACKED_EXPERTS and len(shape) == 3:
        expert, first = divmod(region.start, shape[1] * shape[2])
    rows: tuple[int, int] | None = (0, region.shape[-1])
    if region.layout.blocks:
        block = region.layout.blocks[k]
        rows = (block.start, block.stop) if block.groups == 1 else None
    elif region.layout.orientation == "OI":
        columns = max(math.prod(region.shape[1:]), 1)
        rows = (first // columns, first // columns + region.shape[0])
    return file.find(source, expert=expert, rows=rows)
