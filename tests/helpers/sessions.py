"""Runs as their driver sees them: inputs and outputs opened, units merged through a `Session` or an executor."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.executors.base import Executor
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.observer import ObserverFactory
from actmat.engine.record import Record
from actmat.engine.resources import one_thread
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Unit, plan_units
from actmat.planning.model import Item
from actmat.planning.work import HOST, DeviceRoom
from actmat.recipe import make_recipe
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all

Run = tuple[SessionSpec, list[Unit], list[UnitResult]]


@dataclass
class OpenedRun:
    """A run whose inputs and outputs are opened.

    Args:
        spec, units: of the run.
        inputs, writers: opened.
        results: of units that were merged.
        records: of their items, by plan and item.
        findings: of all results.
    """

    spec: SessionSpec
    units: list[Unit]
    inputs: Inputs
    writers: Sequence[ShardWriter]
    results: list[UnitResult] = field(default_factory=list)
    records: dict[tuple[int, str], Record] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    def survey(self, executor: Executor) -> None:
        """Let the executor survey the whole model."""
        self._use(executor.survey(self.spec))

    def merge_here(self) -> None:
        """Do everything in one session in this process."""
        with one_thread():
            self._use(_survey_in(Session(self.spec, self.inputs, self.writers)))
            session = Session(self.spec, self.inputs, self.writers)
            self.take(session.merge(unit) for unit in self.units)

    def take(self, results: Iterable[UnitResult]) -> None:
        """Record results."""
        for result in results:
            self.results.append(result)
            self.findings.add(result.findings)
            for plan, record in result.records:
                assert (plan, record.name) not in self.records, f"two records of '{record.name}'"
                self.records[plan, record.name] = record

    def finish(self) -> None:
        """Complete the output files."""
        for plan, writer in zip(self.spec.plans, self.writers, strict=True):
            writer.finish(plan.specs)

    def files(self) -> list[dict[str, bytes]]:
        """Contents of the output files, per plan."""
        return [{shard.file: (w.directory / shard.file).read_bytes() for shard in w.shards} for w in self.writers]

    def _use(self, surveys: Mapping[SurveyKey, Any]) -> None:
        self.spec = dataclasses.replace(self.spec, surveys=surveys)


def _survey_in(session: Session) -> Mapping[SurveyKey, Any]:
    """All surveys in one session, item by item."""

    def observe(fork: Callable[[], Any], items: Sequence[Item]) -> list[Any]:
        state = fork()
        for item in items:
            session.observe(item, state)
        return [state]

    return run_surveys(session.spec.plans, observe)


@contextlib.contextmanager
def started(
    inputs: Inputs,
    folders: Sequence[Path],
    observers: ObserverFactory | None = None,
    room: DeviceRoom = HOST,
    *,
    in_memory: bool = False,
) -> Iterator[OpenedRun]:
    """A run of opened inputs into `folders`, one for each recipe; no other process opens those that are in memory."""
    plans, writers = plan_all(inputs, room), []
    with contextlib.ExitStack() as stack:
        for folder, plan in zip(folders, plans, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            writers.append(ShardWriter(folder, plan.shards, durable=False))
            stack.callback(writers[-1].close)
        base = None if inputs.base is None or in_memory else inputs.base.tensors.handle()
        experts = () if in_memory else tuple(e.handle() for e in inputs.experts)
        spec = SessionSpec(plans, base, experts, tuple(folders), observers)
        yield OpenedRun(spec, plan_units(plans, [()] * len(plans), observed=observers is not None), inputs, writers)


@contextlib.contextmanager
def opened_run(
    fields: Sequence[Mapping[str, Any]],
    folders: Sequence[Path],
    observers: ObserverFactory | None = None,
    room: DeviceRoom = HOST,
) -> Iterator[OpenedRun]:
    """A run of recipes that share their inputs, by a plan for the devices of `room`."""
    with open_inputs([make_recipe(f) for f in fields]) as (inputs, _), started(inputs, folders, observers, room) as run:
        yield run


def run_here(
    fields: Sequence[Mapping[str, Any]],
    folders: Sequence[Path],
    observers: ObserverFactory | None = None,
    *,
    finish: bool = True,
) -> Run:
    """Merge in one session; the spec with its surveys, units and results. Without `finish` tensors may be missing."""
    with opened_run(fields, folders, observers) as run:
        run.merge_here()
        if finish:
            run.finish()
    return run.spec, run.units, run.results


def merge_units(spec: SessionSpec, units: Sequence[Unit]) -> list[UnitResult]:
    """Results of all units, of a session opened for them."""
    torch.set_num_threads(1)
    with Session.open(spec) as session:
        return [session.merge(unit) for unit in units]
