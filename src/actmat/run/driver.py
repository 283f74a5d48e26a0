"""Carry out a prepared run: run the units, keep the journal, judge the findings, finish the outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actmat.engine.content import FOREIGN
from actmat.engine.executors import THREADS, find_executor
from actmat.engine.findings import Findings
from actmat.engine.session import SessionSpec
from actmat.engine.units import plan_units
from actmat.errors import CheckpointError, StatisticsError
from actmat.progress import Progress
from actmat.run.inputs import check_values
from actmat.run.output import DrawPage, Output
from actmat.run.resume import MergeReport
from actmat.run.run import Run


def execute(outputs: Sequence[Output], run: Run, progress: Progress, doing: str = "merging") -> None:
    """Merge everything that is not done yet; keep the journal, judge the findings.

    Raises:
        CheckpointError: NaN or Inf in the inputs (all of them listed), or a file that changed or ended early.
        StatisticsError: statistics of another model than the one that was read.
    """
    inputs, resources = run.inputs, run.resources
    plans = tuple(o.plan for o in outputs)
    total, resumed = sum(item.action != "tie" for item in plans[0].items), sum(o.resumed for o in outputs)
    progress.doing(doing, total)
    if resumed:
        progress.note(f"Continuing an interrupted merge: {resumed} tensors are done and intact.")
    check_values(inputs)
    units = plan_units(plans, [o.done for o in outputs], observed=run.observers is not None)
    if not units:
        return
    shared = run.places.executor == THREADS  # they use the open inputs; tensors in memory have no address
    spec = SessionSpec(
        plans=plans,
        base=None if inputs.base is None or shared else inputs.base.tensors.handle(),
        experts=() if shared else tuple(e.handle() for e in inputs.experts),
        outputs=tuple(o.folder for o in outputs),
        observers=run.observers,
        device=resources.device,
    )
    make = find_executor(run.places.executor, resources.device)
    executor = make(inputs, [o.writer for o in outputs], resources)
    spec = replace(spec, surveys=executor.survey(spec))
    findings = Findings()
    with contextlib.closing(executor.run(spec, units)) as results:
        for parts, result in enumerate(results, 1 + min(resumed // len(outputs), total)):
            findings.add(result.findings)
            if findings.foreign_statistics:
                break
            if not findings.fatal:
                for p, record in result.records:
                    outputs[p].keep(record)
            progress.done(parts)
            for note in result.notes:
                progress.note(note)
    _judge(findings)


def _judge(findings: Findings) -> None:
    """Raise findings in the inputs that forbid the merge."""
    if findings.foreign_statistics:
        raise StatisticsError(FOREIGN, sorted(findings.foreign_statistics))
    if findings.broken_ties and not findings.nonfinite:
        raise CheckpointError(
            f"The inputs hold tensors that config.json ties and that differ: {len(findings.broken_ties)} problem(s). "
            "Merging one for both would lose the other.",
            sorted(findings.broken_ties),
        )
    if findings.fatal:
        problems = findings.problems()
        error = CheckpointError(
            f"The inputs hold values that cannot be merged: {len(problems)} problem(s). NaN and Inf would spread; find "
            "out why the fine-tuning produced them, or copy these tensors from the base (--keep NAME).",
            problems,
        )
        error.is_permanent = True
        raise error


def finish(outputs: Sequence[Output], run: Run, draw: DrawPage | None) -> dict[Path | str, MergeReport]:
    """Write the reports and other files of merged outputs; `stage` renames the outputs afterwards."""
    return {output.out: output.finish(run, draw) for output in outputs}
