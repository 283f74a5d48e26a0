"""Execute plans on this machine: several workers, each on one tensor at a time, within a memory budget.

Every worker runs its linear algebra on one core. Results then cannot depend on how many workers there are (a
threaded BLAS may split sums differently), and two workers scale better than one threaded eigensolver.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.engine.findings import Findings
from actmat.engine.memory import Budget, Scratch
from actmat.engine.pool import merge_pool
from actmat.engine.reader import TensorReader
from actmat.engine.reading import room_bytes
from actmat.engine.resources import Resources, one_thread
from actmat.engine.statistics import FOREIGN, RuleStatistics, check_models
from actmat.engine.survey import SurveyKey, run_surveys, survey_key
from actmat.engine.tensor import merge_tensor
from actmat.engine.ties import check_ties
from actmat.engine.variant import TensorRecord, Variant
from actmat.engine.watch import SinkSource, Watch, watch_bytes
from actmat.errors import CheckpointError, StatisticsError
from actmat.experts.base import Expert
from actmat.methods import get_method
from actmat.plan.measured import Measured
from actmat.plan.model import MergePlan, TensorPlan

__all__ = ["Job", "execute"]


@dataclass
class Job:
    """One output: its plan, its files, and the records of tensors that an earlier run finished.

    `on_record` is called with each new record as soon as the tensor's bytes are written (the journal); `watch` makes
    one watch per tensor that is merged.
    """

    plan: MergePlan
    writer: SinkSource
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    on_record: Callable[[dict[str, Any]], None] = lambda record: None
    watch: Callable[[TensorPlan], Watch] | None = None


def execute(
    jobs: Sequence[Job],
    base: Checkpoint,
    experts: Sequence[Expert],
    resources: Resources,
    *,
    measured: Measured | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Carry out several plans over the same inputs; each tensor is read once for all of them.

    `job.done` holds the records of all tensors afterwards. `progress(name, nbytes)` is called, from any thread,
    for each finished tensor with the bytes that the plan counts for it. `measured`: statistics of the experts.

    Raises:
        StatisticsError: statistics of another model than the one that was read.
        CheckpointError: NaN or Inf in the inputs (all of them listed), or a file that changed or ended early.
    """
    findings = Findings(tolerated=jobs[0].plan.recipe.allow_nonfinite)
    labels = jobs[0].plan.recipe.labels
    compute = torch_dtype(jobs[0].plan.recipe.compute_dtype)
    device = torch.device(resources.device)
    units = _units(jobs)
    if resources.workers > 1:  # a large tensor that comes last, as heads do, would leave the other workers idle
        units.sort(key=_unit_traffic, reverse=True)
    peaks = [_unit_bytes(unit, compute.itemsize) for unit in units]
    # what a worker may keep mapped: with so much each, all workers together stay within what the plan announces
    largest = sorted(peaks, reverse=True)[: resources.workers]
    keep = largest[-1] if largest and sum(largest) <= resources.memory else 0
    moving = {group[0][1].name for unit in units for group in unit if any(_worth_moving(p) for _, p in group)}
    budget = Budget(resources.memory)
    local = threading.local()
    stop = threading.Event()

    def reader_for(item: TensorPlan, notes: Findings = findings, scratch: Scratch | None = None) -> TensorReader:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch(keep=keep)
        where = device if item.name in moving else torch.device("cpu")
        return TensorReader(item, base, experts, labels, compute, where, scratch or local.scratch, notes)

    def one_unit(unit: Unit, peak: int) -> list[list[TensorRecord]]:
        """Records per tensor, per job."""
        if len(unit) == 1 and not unit[0][0][1].pool:
            variants, reader = _variants(unit[0], surveys, measured), reader_for(_leader(unit[0]))
            room = room_bytes(variants, reader)
            with reader.scratch.room.opened(room, beside=max(0, peak - room)):
                return [merge_tensor(variants, reader, findings)]
        by_job = zip(*(_variants(group, surveys, measured) for group in unit), strict=True)
        readers = [reader_for(_leader(group), scratch=Scratch()) for group in unit]
        records = merge_pool(list(by_job), readers, findings)
        return [list(of_tensor) for of_tensor in zip(*records, strict=True)]

    def work(index: int) -> None:
        if stop.is_set():
            return
        unit = units[index]
        with budget.hold(peaks[index]), torch.no_grad():
            if stop.is_set():
                return
            if index + resources.workers < len(units):
                for group in units[index + resources.workers]:
                    _prefetch(_leader(group), base, experts)
            results = one_unit(unit, peaks[index])
            for group, records in zip(unit, results, strict=False):
                leader = _leader(group)
                if records and measured is not None and measured.any:
                    record = next(r for (_, p), r in zip(group, records, strict=True) if p is leader)
                    check_models(leader, experts, measured, record.base_hash, record.expert_hashes, findings)
                if records and (leader.aliases or any(leader.twins)):
                    record = next(r for (_, p), r in zip(group, records, strict=True) if p is leader)
                    check_ties(leader, base, experts, labels, record.base_hash, record.expert_hashes, findings)
            if not findings.fatal:
                for group, records in zip(unit, results, strict=True):
                    _finish(group, records)
        for group in unit:
            progress(group[0][1].name, _traffic(group))

    with one_thread(), concurrent.futures.ThreadPoolExecutor(resources.workers, "actmat") as pool:
        unfinished = [j.plan for j in jobs if any(job is j for unit in units for group in unit for job, _ in group)]
        found = run_surveys(unfinished, lambda item: reader_for(item, Findings(tolerated=True)), pool)
        surveys = {id(p): f for p, f in zip(unfinished, found, strict=True)}
        try:
            for future in concurrent.futures.as_completed([pool.submit(work, i) for i in range(len(units))]):
                future.result()
        except BaseException:  # whatever it is (Ctrl-C too): let running tensors end, start no new ones, pass it on
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if findings.foreign_statistics:
        problems = sorted(findings.foreign_statistics)
        raise StatisticsError(FOREIGN, problems)
    if findings.fatal:
        problems = findings.problems()
        raise CheckpointError(
            f"The inputs hold values that cannot be merged: {len(problems)} problem(s). NaN and Inf would spread; find "
            "out why the fine-tuning produced them, or pass --allow-nonfinite to treat them as unchanged.",
            problems,
        )


Group = list[tuple[Job, TensorPlan]]
"""One tensor, and the jobs that want it."""

Unit = list[Group]
"""What is merged at a time: one tensor, or the tensors of a pool."""


def _units(jobs: Sequence[Job]) -> list[Unit]:
    """What is still to do, in the order of the plan; ties go with their tensor, a pool is done whole."""
    groups: dict[tuple[str, str], Group] = {}
    for job in jobs:
        # an interruption may fall between the journal's lines of a tensor and of those tied to it
        todo = {
            i.pool or i.name
            for i in job.plan.tensors
            if i.action != "tie" and not job.done.keys() >= {i.name, *i.aliases}
        }
        for item in job.plan.tensors:
            if item.action != "tie" and (item.pool or item.name) in todo:
                groups.setdefault((item.pool, item.name), []).append((job, item))
    units: dict[str, Unit] = {}
    for (pool, name), group in groups.items():
        units.setdefault(pool or name, []).append(group)
    return [sorted(unit, key=lambda group: group[0][1].name) for unit in units.values()]


def _prefetch(item: TensorPlan, base: Checkpoint, experts: Sequence[Expert]) -> None:
    base.prefetch([item.name])
    for expert, source in zip(experts, item.sources, strict=False):
        expert.prefetch([source])


def _worth_moving(item: TensorPlan) -> bool:
    """Whether an accelerator helps: elementwise rules cost less than the way there and back."""
    from actmat.methods import get_method

    return item.call is not None and get_method(item.call.method).acts_on != "elementwise"


def _leader(group: Group) -> TensorPlan:
    """The item that says what is read: one that merges, where there is one, else the experts are left alone."""
    return next((p for _, p in group if p.call is not None), group[0][1])


def _traffic(group: Group) -> int:
    return max(p.read_bytes + p.write_bytes for _, p in group)


def _unit_traffic(unit: Unit) -> int:
    """Bytes that are read and written: what the time of a unit goes by, as far as the order needs to know it."""
    return sum(_traffic(group) for group in unit)


def _unit_bytes(unit: Unit, itemsize: int) -> int:
    """Memory for one tensor or pool, and for those who watch it."""
    watching = sum(watch_bytes(p, itemsize) for group in unit for job, p in group if job.watch is not None)
    return max(_peak_bytes(group, itemsize) for group in unit) + watching


def _peak_bytes(group: Group, itemsize: int) -> int:
    """Memory for one tensor: its plan's; where several variants share the deltas, all of these are alive.

    A rule that streams, and so counts no base and no result in its plan, is then given both.
    """
    largest = max(p.peak_bytes for _, p in group)
    if len(group) == 1:
        return largest
    merging = [p for _, p in group if p.call is not None]
    together = len(merging[0].sources) if len(merging) > 1 else 0
    if any(get_method(p.call.method).streams(p.call.options) for p in merging if p.call is not None):
        together += 2
        largest += merging[0].numel * torch_dtype(merging[0].base_dtype).itemsize
    return largest + (merging[0].numel * together * itemsize if merging else 0)


def _variants(group: Group, surveys: Mapping[int, Mapping[SurveyKey, Any]], measured: Measured | None) -> list[Variant]:
    return [
        Variant(
            item=item,
            sink=job.writer.sink(item.name, item.aliases),
            seed=job.plan.recipe.seed,
            postprocess=job.plan.recipe.postprocess,
            survey=surveys[id(job.plan)].get(survey_key(item.call)) if item.call else None,
            statistics=RuleStatistics(measured, job.plan.recipe.gram_mean) if measured is not None else None,
            watch=job.watch(item) if job.watch is not None and item.call is not None else None,
        )
        for job, item in group
    ]


def _finish(group: Group, records: Sequence[TensorRecord]) -> None:
    for (job, item), record in zip(group, records, strict=True):
        row = record.to_json()
        for name in (item.name, *item.aliases):
            job.done[name] = row if name == item.name else row | {"name": name, "seconds": 0.0}
            job.on_record(job.done[name])
