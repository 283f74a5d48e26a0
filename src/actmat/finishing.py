"""Complete an output that was merged in parts: are all of them there, and what goes with the weights."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.shared import SharedStage
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.inputs import Inputs
from actmat.engine.shares import share_units
from actmat.engine.units import plan_units
from actmat.errors import OutputError, memory_errors
from actmat.inputs import opened_inputs
from actmat.output import JournalRecords, StagedOutput, intact_items
from actmat.parts import PartStage
from actmat.planning import MergePlan
from actmat.report import Totals, read_manifest, recorded_totals, sum_records, verify
from actmat.system import usable_cores

__all__ = ["FinishReport", "finish_parts"]

SHOWN = 8
"""Missing parts that an error lists with their commands."""


@dataclass(frozen=True, slots=True)
class FinishReport:
    """Result of `finish_parts`.

    Args:
        out: directory of the output.
        tensors: number of its tensors.
        seconds: wall time.
        parts: that it was made of; 0 where `was_finished`.
        was_finished: an earlier call finished it; it was verified.
        totals: sums over all tensors.
        notes: of the plan.
    """

    out: Path
    tensors: int
    seconds: float
    parts: int = 0
    was_finished: bool = False
    totals: Totals = field(default_factory=Totals)
    notes: tuple[str, ...] = ()


@memory_errors()
def finish_parts(
    out: Path,
    *,
    check: bool = True,
    overwrite: bool = False,
    durable: bool = True,
    sha256: bool = False,
    threads: int | None = None,
) -> FinishReport:
    """Complete the output that parts have built: index, config, model card and manifest; then its final name.

    An output that is finished is verified.

    Args:
        out: as it was given to the parts.
        check: hash every tensor again as it lies on the disk, and compare it with what its part wrote.
        overwrite: replace an earlier output of actmat at `out`.
        durable: wait until all is on the disk before it appears.
        sha256: add SHA-256 of the weight files to the manifest.
        threads: that hash; default: all cores.

    Raises:
        OutputError: parts are missing, each with the command that makes it; nothing is changed then. Or there are no
            parts, inputs changed since, or a finished output is not as it was written.
    """
    began = time.perf_counter()
    stage = SharedStage(out)
    if not stage.is_open:
        return _verified(stage, began)
    head = stage.head()
    plan = MergePlan.read(stage.plan_path)
    if plan.fingerprint() != head.get("fingerprint"):
        raise OutputError(f"{stage.plan_path} was changed. Fix: remove {stage.folder} (rm -r) and run all parts again.")
    stage.take_lock()
    try:
        with opened_inputs([plan.recipe]) as inputs, contextlib.ExitStack() as stack:
            _check_unchanged(plan, inputs, stage)
            writer = ShardWriter(stage.path, plan.shards, durable=durable, attach="cached")
            stack.callback(writer.close)
            workers = usable_cores() if threads is None else threads
            records = JournalRecords(_Gathered(_gather(stage, head, plan, writer if check else None, workers)))
            output = StagedOutput(plan, writer, records, PartStage(stage))
            if head.get("diagnose"):
                output.write_report(time.perf_counter() - began)
            output.finish(inputs, time.perf_counter() - began, sha256=sha256)
            totals = sum_records(plan, records)
        stage.commit(overwrite=overwrite)
    finally:
        stage.release_lock()
    seconds = time.perf_counter() - began
    return FinishReport(out, len(plan.specs), seconds, head["parts"], totals=totals, notes=plan.notes)


def _check_unchanged(plan: MergePlan, inputs: Inputs, stage: SharedStage) -> None:
    """Refuse inputs that are not those of the plan any more.

    Raises:
        OutputError: names them.
    """
    opened = (*(() if inputs.base is None else (inputs.base,)), *inputs.experts)
    changed = [s.label for s, now in zip(plan.inputs, opened, strict=True) if s.files != now.identity()]
    if changed:
        raise OutputError(
            f"Files of {', '.join(changed)} have changed since the parts were made, so that {stage.out} would not be "
            f"what its manifest says. Restore them, or remove {stage.folder} (rm -r) and run all parts again."
        )


def _verified(stage: SharedStage, began: float) -> FinishReport:
    """Report of an output that is finished.

    Raises:
        OutputError: there is none, or it is not as it was written.
    """
    out = stage.out
    if not os.path.isdir(out) or not os.listdir(out):
        raise OutputError(
            f"There are no parts of a merge into {out}: expected the folder {stage.folder}. Likely cause: another "
            f"--out, or another machine's disk. Make them: actmat merge ... --out {out} --part 1/N to N/N."
        )
    result = verify(out)
    if not result.ok:
        raise OutputError(f"{out} is finished, but is not as it was written.", result.problems)
    stage.sweep()
    totals = recorded_totals(read_manifest(out))
    return FinishReport(out, result.tensors, time.perf_counter() - began, was_finished=True, totals=totals)


Gathered = dict[str, Journal]
"""Name of an item -> the journal that has its record."""


class _Gathered(Mapping[str, Mapping[str, Any]]):
    """Entries of all parts."""

    def __init__(self, journals: Gathered) -> None:
        self._journals = journals

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._journals[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._journals)

    def __len__(self) -> int:
        return len(self._journals)


def _gather(
    stage: SharedStage, head: Mapping[str, Any], plan: MergePlan, writer: ShardWriter | None, workers: int
) -> Gathered:
    """The journals of all items, all of which are there and, with a writer, as they were written.

    Raises:
        OutputError: parts that are missing, not finished, or whose bytes are not on the disk, with their commands.
    """
    found: Gathered = {}
    problems: list[str] = []
    total = head["parts"]
    command = head.get("command") or "actmat.merge_part(...)"
    shares = share_units(plan_units([plan], [()], None), total)
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        for number, share in enumerate(shares, start=1):
            names = [plan.items[n].name for unit in share for group in unit.groups for _, n in group]
            attempts = stage.journals(number)
            of_item = [[a for a in attempts if name in a] for name in names]
            done = sum(map(bool, of_item))
            problem = None
            if not attempts:
                problem = f"part {number}/{total} is missing ({len(names)} tensors)"
            elif done < len(names) or not any(a.closing for a in attempts):
                problem = f"part {number}/{total} is not finished: {done} of {len(names)} tensors are done"
            else:
                good = list(pool.map(partial(_first_intact, plan, writer), names, of_item))
                bad = [name for name, journal in zip(names, good, strict=True) if journal is None]
                if bad:
                    problem = (
                        f"part {number}/{total}: {len(bad)} tensors are not on the disk as it wrote them, such as "
                        f"'{bad[0]}'"
                    )
                found.update((n, j) for n, j in zip(names, good, strict=True) if j is not None)
            if problem is not None:
                problems.append(f"{problem}. Run it: {command} --part {number}/{total}")
    if problems:
        few = problems[:SHOWN] + ([f"... and {len(problems) - SHOWN} more parts"] if len(problems) > SHOWN else [])
        raise OutputError(f"{stage.out} cannot be finished: {len(problems)} of {total} parts are not ready.", few)
    return found


def _first_intact(
    plan: MergePlan, writer: ShardWriter | None, name: str, journals: Sequence[Journal]
) -> Journal | None:
    """The first of an item's journals whose record fits the item, and the bytes on the disk."""
    for journal in journals:
        holds = (lambda name, digest: True) if writer is None else writer.holds
        if any(intact_items(plan, {name: journal[name]}, holds, observed=False)):
            return journal
    return None
