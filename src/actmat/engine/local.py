"""Execute plans on this machine: several workers, each on one tensor at a time, within a memory budget.

Every worker runs its linear algebra on one core. Results then cannot depend on how many workers there are (a
threaded BLAS may split sums differently), and two workers scale better than one threaded eigensolver.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writer import ShardWriter, TensorSink
from actmat.engine.deltas import Findings, TensorReader
from actmat.engine.memory import Budget, Scratch
from actmat.engine.resources import Resources
from actmat.engine.survey import SurveyKey, run_surveys, survey_key
from actmat.engine.tensor import TensorRecord, Variant, merge_tensor
from actmat.engine.ties import check_ties
from actmat.errors import CheckpointError
from actmat.plan.model import MergePlan, TensorPlan
from actmat.plan.parts import CHUNK

__all__ = ["Job", "execute", "one_thread_each"]


@dataclass
class Job:
    """One output: its plan, its files, and the records of tensors that an earlier run finished.

    `on_record` is called with each new record as soon as the tensor's bytes are written (the journal).
    """

    plan: MergePlan
    writer: ShardWriter
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    on_record: Callable[[dict[str, Any]], None] = lambda record: None


def execute(
    jobs: Sequence[Job],
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    resources: Resources,
    *,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Carry out several plans over the same inputs; each tensor is read once for all of them.

    `job.done` holds the records of all tensors afterwards. `progress(name, nbytes)` is called, from any thread,
    for each finished tensor with the bytes that the plan counts for it.

    Raises:
        CheckpointError: NaN or Inf in the inputs (all of them listed), or a file that changed or ended early.
    """
    findings = Findings(tolerated=jobs[0].plan.recipe.allow_nonfinite)
    labels = jobs[0].plan.recipe.labels
    compute = torch_dtype(jobs[0].plan.recipe.compute_dtype)
    device = torch.device(resources.device)
    items = _items(jobs)
    budget = Budget(resources.memory)
    local = threading.local()
    stop = threading.Event()

    def reader_for(item: TensorPlan, notes: Findings = findings) -> TensorReader:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        where = device if item.call is not None and _worth_moving(item) else torch.device("cpu")
        return TensorReader(item, base, experts, labels, compute, where, local.scratch, notes)

    def work(index: int) -> None:
        if stop.is_set():
            return
        name, group = items[index]
        with budget.hold(max(p.peak_bytes for _, p in group)), torch.no_grad():
            if stop.is_set():
                return
            if index + resources.workers < len(items):
                upcoming = items[index + resources.workers][1][0][1]
                base.prefetch([upcoming.name])
                for expert, source in zip(experts, upcoming.sources, strict=False):
                    expert.prefetch([source])
            results = _one_tensor(group, base, reader_for, findings, surveys)
            if results and any(p.aliases or any(p.twins) for _, p in group):
                item, record = group[0][1], results[0][1]
                check_ties(item, base, experts, labels, record.base_hash, record.expert_hashes, findings)
            if not findings.fatal:
                _finish(group, results)
        progress(name, max(p.read_bytes + p.write_bytes for _, p in group))

    with one_thread_each(), concurrent.futures.ThreadPoolExecutor(resources.workers, "actmat") as pool:
        unfinished = [j.plan for j in jobs if any(job is j for _, group in items for job, _ in group)]
        surveys = run_surveys(unfinished, lambda item: reader_for(item, Findings(tolerated=True)), pool)
        try:
            for future in concurrent.futures.as_completed([pool.submit(work, i) for i in range(len(items))]):
                future.result()
        except BaseException:  # whatever it is (Ctrl-C too): let running tensors end, start no new ones, pass it on
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if findings.fatal:
        problems = findings.problems()
        raise CheckpointError(
            f"The inputs hold values that cannot be merged: {len(problems)} problem(s). NaN and Inf would spread; find "
            "out why the fine-tuning produced them, or pass --allow-nonfinite to treat them as unchanged.",
            problems,
        )


Group = list[tuple[Job, TensorPlan]]


def _items(jobs: Sequence[Job]) -> list[tuple[str, Group]]:
    """Tensors still to do, in the order of the plan, with the jobs that want them; ties go with their tensor."""
    groups: dict[str, Group] = {}
    for job in jobs:
        for item in job.plan.tensors:
            if item.action != "tie" and item.name not in job.done:
                groups.setdefault(item.name, []).append((job, item))
    return list(groups.items())


def _worth_moving(item: TensorPlan) -> bool:
    """Whether an accelerator helps: elementwise rules cost less than the way there and back."""
    from actmat.methods import get_method

    assert item.call is not None
    return get_method(item.call.method).acts_on != "elementwise"


def _one_tensor(
    group: Group,
    base: Checkpoint,
    reader_for: Callable[[TensorPlan], TensorReader],
    findings: Findings,
    surveys: dict[SurveyKey, Any],
) -> list[tuple[Job, TensorRecord]]:
    out: list[tuple[Job, TensorRecord]] = []
    merging = [(j, p) for j, p in group if p.action != "copy"]
    for job, item in group:
        if item.action == "copy":
            out.append((job, _copy(item, base, job.writer.sink(item.name, item.aliases))))
    if merging:
        variants = [
            Variant(
                item=p,
                sink=j.writer.sink(p.name, p.aliases),
                seed=j.plan.recipe.seed,
                postprocess=j.plan.recipe.postprocess,
                survey=surveys.get(survey_key(p.call)) if p.call else None,
            )
            for j, p in merging
        ]
        reader = reader_for(merging[0][1])
        records = merge_tensor(variants, reader, findings)
        out.extend(zip((j for j, _ in merging), records, strict=False))
    return out


def _finish(group: Group, results: list[tuple[Job, TensorRecord]]) -> None:
    plans = {id(j): p for j, p in group}
    for job, record in results:
        row = record.to_json()
        job.on_record(row)
        job.done[record.name] = row
        for alias in plans[id(job)].aliases:
            job.done[alias] = row | {"name": alias, "seconds": 0.0}
            job.on_record(job.done[alias])


def _copy(item: TensorPlan, base: Checkpoint, sink: TensorSink) -> TensorRecord:
    """The base's tensor, bit for bit unless the output has another float dtype."""
    began = time.perf_counter()
    dtype, out_dtype = torch_dtype(item.base_dtype), torch_dtype(item.out_dtype)
    seen = ContentHash()
    numel = item.numel
    for start in range(0, numel, CHUNK):
        piece = torch.empty(min(CHUNK, numel - start), dtype=dtype)
        data = raw_bytes(piece)
        base.read_into(item.name, start * piece.itemsize, data)
        seen.update(data)
        sink.write(raw_bytes(piece.to(out_dtype)))
    return TensorRecord(item.name, sink.digest, seen.hexdigest(), unchanged=True, seconds=time.perf_counter() - began)


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """One BLAS thread per worker for the duration of the block; torch has no narrower switch than the process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
