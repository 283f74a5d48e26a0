"""A session merges units and observes items for surveys: opened once per worker, it returns records and findings.

    with Session.open(spec) as session:
        result = session.merge(unit)

No callbacks, no state shared with other sessions: one in another process or on another machine gives the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from actmat.checkpoints.base import TensorsHandle, torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import open_handle as open_tensors_handle
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.content import broken_ties, foreign_tensors
from actmat.engine.deltas import RegionDeltas
from actmat.engine.devices import Device, device_memory_errors, open_devices
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.item import merge_item
from actmat.engine.memory import Scratch
from actmat.engine.method import observed_deltas
from actmat.engine.observer import ObserverFactory, Writer
from actmat.engine.reader import ItemReader
from actmat.engine.record import Record
from actmat.engine.survey import SurveyKey, survey_key
from actmat.engine.task import Task
from actmat.engine.units import Member, Unit
from actmat.experts.deltas import DeltasHandle
from actmat.experts.locate import open_handle
from actmat.methods import get_method
from actmat.planning.item import Item
from actmat.planning.model import MergePlan
from actmat.planning.regions import cut
from actmat.planning.statistics import opened_statistics
from actmat.planning.work import module_region, shared_regions


@dataclass(frozen=True)
class SessionSpec:
    """Everything that a worker needs to open a session; picklable.

    Args:
        plans: of all outputs of the run; they share inputs and compute dtype.
        base: handle of the base, or None.
        experts: handles of the experts.
        outputs: per plan, the folder of the files to write; None: nothing is written.
        observers: makes observers, for a run with a diagnosis.
        surveys: results of surveys of whole models.
        device: where items with `device_bytes` are merged, see `engine.devices`; a session of its own process takes
            the first of several.
        room: bytes that a worker may keep mapped between tensors.
    """

    plans: tuple[MergePlan, ...]
    base: TensorsHandle | None
    experts: tuple[DeltasHandle, ...]
    outputs: tuple[Path | None, ...]
    observers: ObserverFactory | None = None
    surveys: Mapping[SurveyKey, Any] = field(default_factory=dict)
    device: str = "cpu"
    room: int = 0


@dataclass(frozen=True)
class UnitResult:
    """Result of one unit; picklable.

    Args:
        unit: which one.
        records: (position of the plan, record) for every output whose bytes are written.
        findings: problems with the values that were read.
        notes: sentences about the run for the user, such as a worker that was lost.
    """

    unit: Unit
    records: tuple[tuple[int, Record], ...]
    findings: Findings
    notes: tuple[str, ...] = ()


class Session:
    """Merges units, one at a time; belongs to one thread.

    Its results are the same for any number of sessions if torch uses one thread inside, see `resources.one_thread`.

    Args:
        spec: plans, inputs and outputs.
        inputs: opened.
        writers: per plan, receives the output's bytes.
        device: for items with `device_bytes`; default: all items are merged on the host.

    Attributes:
        inspect_only: set it when the run has failed and values are read only to find all problems.
    """

    def __init__(
        self, spec: SessionSpec, inputs: Inputs, writers: Sequence[Writer | None], device: Device | None = None
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.inspect_only = False
        self._writers = writers
        self._compute = torch_dtype(spec.plans[0].recipe.compute_dtype)
        self.device = device
        self._scratch = Scratch(keep=spec.room)

    @classmethod
    @contextlib.contextmanager
    def open(cls, spec: SessionSpec, *, synchronous: bool = False) -> Iterator[Session]:
        """A session with inputs and output files of its own, for a worker in another process.

        Args:
            spec: plans, inputs and outputs; the driver has prepared the output files.
            synchronous: every write waits for the storage; needed where workers on several machines share files.

        Raises:
            MergeError: an input or an output file cannot be opened.
        """
        recipe = spec.plans[0].recipe
        with contextlib.ExitStack() as stack:
            base = None if spec.base is None else stack.enter_context(Model(open_tensors_handle(spec.base)))
            experts = [stack.enter_context(open_handle(handle)) for handle in spec.experts]
            statistics = stack.enter_context(opened_statistics(recipe))
            writers: list[Writer | None] = []
            for plan, folder in zip(spec.plans, spec.outputs, strict=True):
                if folder is None:
                    writers.append(None)
                    continue
                attach: Literal["cached", "synchronous"] = "synchronous" if synchronous else "cached"
                writer = ShardWriter(folder, plan.shards, durable=False, attach=attach)  # the driver syncs in the end
                stack.callback(writer.close)
                writers.append(writer)
            device = next(iter(open_devices(spec.device)), None)
            yield cls(spec, Inputs((recipe,), base, experts, statistics), writers, device)

    def merge(self, unit: Unit) -> UnitResult:
        """Merge and write one unit.

        Raises:
            NumericalError, RecipeError: from a method, with the name of the item.
            CheckpointError, OutputError: an input or the output cannot be read or written.
            MergeError: a device has too little memory.
        """
        findings = Findings()
        tasks = [self._task(member) for member in unit.members]
        device = self.device if unit.device_bytes else None
        with torch.no_grad(), device_memory_errors(device, unit.name, unit.device_bytes):
            records = merge_item(tasks, self._opened(unit, findings))
            for task, record in zip(tasks, records, strict=False):
                self._check(task, record, findings, tasks)
        written = () if findings.fatal or self.inspect_only else records
        return UnitResult(
            unit, tuple((member[0], r) for member, r in zip(unit.members, written, strict=False)), findings
        )

    def prefetch(self, unit: Unit) -> None:
        """Ask the system to read ahead what a unit needs."""
        self.inputs.prefetch(_leader([self._item(member) for member in unit.members]))

    def observe(self, item: Item, state: Any) -> None:
        """Give the deltas of an item to a state of its method's survey."""
        assert item.call is not None
        method = get_method(item.call.method)
        assert method.survey is not None
        ignored, on_device = Findings(), item.cost.device_bytes > 0  # they are found when it is merged
        reader = self._item_reader(item, ignored, on_device=on_device)
        regions = [module_region(item.target)] if item.is_module else cut(item.shape, item.layout, method.acts_on)
        with torch.no_grad():
            for region in regions:
                base = reader.read_base(region) if item.has_base else None
                deltas = RegionDeltas(reader, region, base, "held")
                for matrices in observed_deltas(item, deltas, method.acts_on):
                    method.survey.observe(state, matrices, item.call.options)
                deltas.release()

    def _check(self, task: Task, record: Record, findings: Findings, outputs: Sequence[Task]) -> None:
        """Compare the content hashes of a tensor with its ties and with the inputs of the statistics."""
        item = task.item
        if item is _leader([t.item for t in outputs]) and item.has_base:
            contents = record.base_hash, record.expert_hashes
            findings.foreign_statistics += foreign_tensors(item, self.inputs, *contents)
            findings.broken_ties += broken_ties(item, self.inputs, *contents)

    def _task(self, member: Member) -> Task:
        plan, item = self.spec.plans[member[0]], self._item(member)
        observers = self.spec.observers if item.call is not None and item.is_observed else None
        return Task(
            plan=plan,
            item=item,
            writer=self._writers[member[0]],
            survey=self.spec.surveys.get(survey_key(member[0], item.call)) if item.call is not None else None,
            observer=observers(item) if observers is not None else None,
        )

    def _item(self, member: Member) -> Item:
        return self.spec.plans[member[0]].items[member[1]]

    def _opened(self, unit: Unit, findings: Findings) -> ItemReader:
        """The reader of a unit's tensor or module; bad values go to `findings`."""
        items = [self._item(member) for member in unit.members]
        reader = self._item_reader(_leader(items), findings, on_device=unit.device_bytes > 0)
        reader.regions = shared_regions(items)
        reader.reading, reader.planned_bytes = unit.reading, unit.host_bytes
        reader.inspect_only = self.inspect_only
        return reader

    def _item_reader(self, item: Item, findings: Findings, *, on_device: bool) -> ItemReader:
        device = self.device.torch_device if on_device and self.device is not None else None
        return ItemReader(item, self.inputs, self._compute, self._scratch, findings, device)


def _leader(items: Sequence[Item]) -> Item:
    """The item that determines what to read: the first that merges, else any (only the base is read then)."""
    return next((i for i in items if i.call is not None), items[0])
