"""The test-suite of the `Executor` contract.

Every `test_*` method of `ExecutorConformance` stores small inputs in an empty folder and checks one clause of the
contract by plain assertions, against one session in this process that merges unit after unit.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load
from tests.helpers.samples import Samples
from tests.helpers.sessions import OpenedRun, opened_run
from torch import Tensor

from actmat.engine.executors.base import Executor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import ObservedMerge, ObserverFactory, Writer
from actmat.engine.resources import Resources
from actmat.engine.session import UnitResult
from actmat.engine.units import plan_units
from actmat.errors import NumericalError
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.planning.model import Item
from actmat.planning.work import DeviceRoom

RecipeFields = Mapping[str, Any]
"""Fields of a recipe other than its inputs."""


class ExecutorConformance(abc.ABC):
    """One method per clause of `Executor`.

    Attributes:
        workers: units that run at the same time at most.
        device: names of the devices that plans are made for; on those of a CPU the bytes are those of the host.
        near: relative difference of tensors from those of the host that a real device may have; 0: the same bytes.
    """

    workers: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    near: ClassVar[float] = 0.0

    @abc.abstractmethod
    def make(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> Executor:
        """The executor; arguments as for `ExecutorFactory`."""

    def test_full_checkpoints_and_variants(self, tmp_path: Path) -> None:
        """Several methods over one reading, deterministic and random ones; tied tensors are written too."""
        variants: list[RecipeFields] = [
            {"method": "actmat"},
            {"method": "average", "scale": 0.5, "scope": "all"},
            {"method": "dare", "seed": 3, "options": {"density": 0.5}},
            {"method": "ties"},
        ]
        run = self._assert_same(Samples.checkpoints(tmp_path), variants)
        assert not run.spec.surveys, "surveys that no method asked for"
        assert any(item.target.tied for item in run.spec.plans[0].items), "no tied tensors"

    def test_surveys_of_the_whole_model(self, tmp_path: Path) -> None:
        """Thresholds over all items, whichever worker saw which."""
        variants: list[RecipeFields] = [
            {"method": "ties", "options": {"trim": "global"}},
            {"method": "ties", "options": {"trim": "global", "variant": "mergekit", "density": 0.4}},
            {"method": "knots", "options": {"trim": "global"}},
        ]
        run = self._assert_same(Samples.checkpoints(tmp_path), variants)
        assert len(run.spec.surveys) == len(variants), "a variant without its survey"

    def test_statistics(self, tmp_path: Path) -> None:
        """Methods that take statistics of the experts."""
        run = self._assert_same(Samples.checkpoints(tmp_path, statistics=True), [{"method": "regmean"}])
        assert any(i.call is not None and get_method(i.call.method).needs_statistics for i in run.spec.plans[0].items)

    def test_adapters_into_a_model(self, tmp_path: Path) -> None:
        """LoRA adapters that are added to their base."""
        variants: list[RecipeFields] = [{"method": "actmat"}, {"method": "ties", "options": {"trim": "global"}}]
        self._assert_same(Samples.adapters(tmp_path), [{**v, "output": "model"} for v in variants])

    def test_adapters_into_an_adapter(self, tmp_path: Path) -> None:
        """LoRA adapters that stay one, with and without a survey, and in the core space."""
        variants: list[RecipeFields] = [
            {"method": "actmat"},
            {"method": "knots", "options": {"trim": "global"}},
            {"method": "ties", "space": "core", "post": "isotropize"},
        ]
        samples = dataclasses.replace(Samples.adapters(tmp_path), base=None)
        run = self._assert_same(samples, [{**v, "output": "adapter"} for v in variants])
        assert all(item.is_module for item in run.spec.plans[0].items), "no adapter"

    def test_observers_give_the_same_measures(self, tmp_path: Path) -> None:
        """Observers are made where the unit runs, and their measures come back with its records."""
        run = self._assert_same(Samples.checkpoints(tmp_path), [{"scope": "all"}], _Norms)
        names = {name for (_, name), record in run.records.items() if record.observed}
        assert names == {item.name for item in run.spec.plans[0].items if item.is_observed}, "records without measures"

    def test_all_findings_are_reported(self, tmp_path: Path) -> None:
        """A fatal finding does not hide those of later units."""
        samples = Samples.checkpoints(tmp_path)
        names = samples.damage()
        expected, found = self._both(samples, [{"method": "average"}])
        assert found.findings.problems() == expected.findings.problems(), "other findings than in one session"
        assert len(found.findings.problems()) == len(names), found.findings.problems()
        assert found.findings.fatal

    def test_no_units(self, tmp_path: Path) -> None:
        """A run without units is not an error."""
        with self._opened(Samples.checkpoints(tmp_path), [{}], "out") as (run, executor):
            assert not [*executor.run(run.spec, [])]

    def test_an_error_is_raised_and_ends_the_run(self, tmp_path: Path) -> None:
        """An error of a method is raised as it is; no other unit starts, not even later."""
        samples = Samples.checkpoints(tmp_path, constant=2e38)  # the sum of two overflows, in every tensor
        starts = _Starts.make(tmp_path / "starts")
        fields = {"method": "task_arithmetic", "scope": "all", "options": {}}
        with self._opened(samples, [fields], "out", starts) as (run, executor):
            units = [unit for unit in run.units if run.spec.plans[0].by_name[unit.name].is_observed]
            assert len(units) > self.workers, "too few units to tell"
            message = _error_of(executor.run(run.spec, units))
            assert "task_arithmetic" in message, f"another error: {message}"
            begun = starts.names()
            assert 1 <= len(begun) <= self.workers, f"{len(begun)} units were started for {self.workers} workers"
            _assert_stays(starts, begun)

    def test_a_closed_run_can_be_resumed(self, tmp_path: Path) -> None:
        """Closing the iterator ends the run; the rest gives the bytes of an uninterrupted one."""
        samples, fields = Samples.checkpoints(tmp_path), [{"method": "ties", "options": {"trim": "global"}}]
        starts, others = _Starts.make(tmp_path / "starts"), _Starts.make(tmp_path / "others")
        with self._started(samples, fields, "expected", others) as whole:
            whole.merge_here()
        with self._opened(samples, fields, "out", starts) as (run, executor):
            run.survey(executor)
            results = executor.run(run.spec, run.units)
            run.take([next(results)])
            results.close()
            _assert_stays(starts, starts.names())
        with self._opened(samples, fields, "out", others) as (rest, executor):
            rest.survey(executor)
            done = {name for _, name in run.records}
            units = plan_units(rest.spec.plans, [done], observed=True)
            assert len(units) == len(rest.units) - 1, "a unit that is done has no record"
            rest.take(executor.run(rest.spec, units))
            rest.records.update(run.records)
            _assert_equal(whole, rest, self.near)

    def test_results_are_not_kept(self, tmp_path: Path) -> None:
        """A result that was yielded is released: a run may have a million."""
        with self._opened(Samples.checkpoints(tmp_path), [{"method": "average"}], "out") as (run, executor):
            yielded: list[weakref.ref[UnitResult]] = []
            for result in executor.run(run.spec, run.units):
                yielded.append(weakref.ref(result))
                del result
                alive = [ref for ref in yielded if ref() is not None]
                if len(alive) > 1:
                    gc.collect()
                    alive = [ref for ref in alive if ref() is not None]
                assert len(alive) <= 1, f"{len(alive)} of {len(yielded)} results are kept"

    def _assert_same(
        self, samples: Samples, variants: Sequence[RecipeFields], observers: ObserverFactory | None = None
    ) -> OpenedRun:
        """Assert that the executor gives what one session gives, and that nothing was found; what it did."""
        expected, found = self._both(samples, variants, observers)
        assert not found.findings.fatal, found.findings.problems()
        same = found.spec.surveys == expected.spec.surveys
        assert same or self.near, "other results of surveys than in one session"
        _assert_equal(expected, found, self.near)
        return found

    def _both(
        self, samples: Samples, variants: Sequence[RecipeFields], observers: ObserverFactory | None = None
    ) -> tuple[OpenedRun, OpenedRun]:
        with self._started(samples, variants, "expected", observers) as expected:
            expected.merge_here()
        with self._opened(samples, variants, "out", observers) as (found, executor):
            found.survey(executor)
            found.take(executor.run(found.spec, found.units))
        assert Counter(r.unit for r in found.results) == Counter(found.units), "not one result per unit"
        return expected, found

    @contextlib.contextmanager
    def _opened(
        self, samples: Samples, variants: Sequence[RecipeFields], name: str, observers: ObserverFactory | None = None
    ) -> Iterator[tuple[OpenedRun, Executor]]:
        with self._started(samples, variants, name, observers) as run:
            yield run, self.make(run.inputs, run.writers, Resources(self.workers, 1 << 30, self.device))

    def _started(
        self, samples: Samples, variants: Sequence[RecipeFields], name: str, observers: ObserverFactory | None
    ) -> contextlib.AbstractContextManager[OpenedRun]:
        folders = [samples.folder / name / str(p) for p in range(len(variants))]
        return opened_run(
            [samples.recipe() | fields for fields in variants], folders, observers, DeviceRoom(self.device)
        )


def _assert_equal(expected: OpenedRun, found: OpenedRun, near: float) -> None:
    """Assert that two runs read the same, and wrote the same bytes with the same records, or tensors that are near."""
    assert found.records.keys() == expected.records.keys(), "records of other items"
    for key, record in expected.records.items():
        there, own = found.records[key], dict[str, Any](seconds=record.seconds)
        if near:
            own |= {field: getattr(record, field) for field in ("hash", "hashes", "stats", "size", "observed")}
        there = dataclasses.replace(there, **own)
        assert there == record, f"another record of {key}: {there}, expected {record}"
    for p, (mine, theirs) in enumerate(zip(expected.files(), found.files(), strict=True)):
        assert mine.keys() == theirs.keys(), f"plan {p}: other files"
        if not near:
            assert mine == theirs, f"plan {p}: other bytes in {[f for f in mine if mine[f] != theirs[f]]}"
            continue
        for file in mine:
            wanted, given = load(mine[file]), load(theirs[file])
            for name, tensor in wanted.items():
                distance = _norm(tensor.double() - given[name].double())
                assert distance <= near * _norm(tensor.double()), f"plan {p}: '{name}' differs by {distance}"


def _error_of(results: Iterable[UnitResult]) -> str:
    """Message of the error that the first unit must raise."""
    try:
        for result in results:
            raise AssertionError(f"a result of '{result.unit.name}', which cannot be merged")
    except NumericalError as error:
        return str(error)
    raise AssertionError("the error of a method is lost")


def _assert_stays(starts: _Starts, begun: frozenset[str]) -> None:
    """Assert that no unit starts from now on."""
    time.sleep(0.2)  # seconds in which a worker that was forgotten would start dozens of such small units
    assert starts.names() == begun, f"units were started after the end: {sorted(starts.names() - begun)}"


class _Norms:
    """Measures the norms of deltas and result."""

    def __init__(self, item: Item) -> None:
        self._norms: list[list[float]] = []

    def region(self, merged: ObservedMerge) -> None:
        """Measure one region."""
        self._norms.append([_norm(x) for x in (*merged.deltas, merged.value)])

    def finish(self) -> dict[str, Any]:
        """All norms."""
        return {"norms": self._norms}


@dataclass(frozen=True)
class _Starts:
    """Observers that measure nothing; a file in a folder tells that an item was started, in whatever process."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> _Starts:
        """Make the folder."""
        folder.mkdir()
        return cls(folder)

    def __call__(self, item: Item) -> _Norms:
        """Note the start of an item."""
        (self.folder / item.name).touch()
        return _Norms(item)

    def names(self) -> frozenset[str]:
        """Items that were started so far."""
        return frozenset(path.name for path in self.folder.iterdir())


def _norm(value: Tensor | LowRank) -> float:
    return float(torch.linalg.vector_norm(value.dense() if isinstance(value, LowRank) else value))
