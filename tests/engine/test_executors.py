"""Executors through the conformance suite: threads, and one in another process that is made here."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.executor_suite import ExecutorConformance
from tests.helpers.merging import Family, contents

import actmat
from actmat.engine import executors
from actmat.engine.executors import EXECUTORS
from actmat.engine.executors.base import Executor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources, one_thread
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Unit
from actmat.errors import RecipeError
from actmat.extras.conformance.deltas import _other_process
from actmat.planning.model import Item


class ReversedExecutor:
    """Units in reverse order, one after another, in another process, which is given nothing but the spec."""

    def __init__(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> None:
        del inputs, writers, resources

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        def observe(fork: Callable[[], Any], items: Sequence[Item]) -> Iterator[Any]:
            for share in (items[1::2], items[::2]):
                yield _other_process().submit(observe_there, spec, share, fork()).result()

        return run_surveys(spec.plans, observe)

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        for unit in reversed(units):
            yield _other_process().submit(merge_there, spec, unit).result()


def observe_there(spec: SessionSpec, items: Sequence[Item], state: Any) -> Any:
    with one_thread(), Session.open(spec) as session:
        for item in items:
            session.observe(item, state)
    return state


def merge_there(spec: SessionSpec, unit: Unit) -> UnitResult:
    with one_thread(), Session.open(spec) as session:
        return session.merge(unit)


class TestOneThread(ExecutorConformance):
    def make(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> Executor:
        return ThreadExecutor(inputs, writers, resources)


class TestThreeThreads(TestOneThread):
    workers = 3


class TestReversedInAnotherProcess(ExecutorConformance):
    def make(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> Executor:
        return ReversedExecutor(inputs, writers, resources)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "EXECUTORS", {**EXECUTORS, "reversed": ReversedExecutor})


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("diagnose", [False, True])
def test_a_run_names_its_executor(tmp_path: Path, *, diagnose: bool) -> None:
    family = Family.make(tmp_path, layers=1)
    fields: dict[str, Any] = {
        "method": "ties",
        "options": {"trim": "global"},
        "diagnose": diagnose,
        "durable": False,
        "overwrite": True,
        "max_shard_size": "2kB",
        "out": family.out,
    }
    actmat.merge(family.base, family.experts, threads=1, **fields)
    expected = files_of(family.out)
    actmat.merge(family.base, family.experts, executor="reversed", **fields)
    assert files_of(family.out) == expected
    assert ("report.json" in expected) == diagnose


@pytest.mark.usefixtures("registered")
def test_a_diagnosis_names_its_executor(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    found = [actmat.diagnose(family.base, family.experts, executor=name) for name in ("threads", "reversed")]
    assert found[0].measures == found[1].measures
    assert found[0].measures


@pytest.mark.usefixtures("registered")
def test_an_unknown_executor_is_refused_with_the_known_names(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    with pytest.raises(RecipeError, match=r"'reverse'\. Did you mean 'reversed'\? .*threads, reversed, ray"):
        actmat.merge(family.base, family.experts, out=family.out, executor="reverse")
    with pytest.raises(RecipeError, match=r"no executor 'rya'\. Did you mean 'ray'\?"):
        actmat.diagnose(family.base, family.experts, executor="rya")
    assert not family.out.exists()


OF_THE_RUN = ("created", "seconds", "measure", "peak_bytes")
"""Fields of a report that differ between runs: times and memory."""


def files_of(folder: Path) -> dict[str, Any]:
    """Contents of an output; the report as data, without times."""
    files: dict[str, Any] = dict(contents(folder))
    return {
        n: without_times(json.loads(b)) if n.endswith(".json") else b for n, b in files.items() if n[-5:] != ".html"
    }


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in OF_THE_RUN}
    return [without_times(v) for v in value] if isinstance(value, list) else value
