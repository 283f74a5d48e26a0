"""The executor 'ray' on a real cluster of three nodes of one core each, which all tests of this file share."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.executor_suite import ExecutorConformance
from tests.helpers.merging import Family, actmat, contents
from tests.helpers.samples import Samples
from tests.helpers.troubles import Trouble

import actmat as package
from actmat.engine.executors.base import Executor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources
from actmat.engine.session import UnitResult
from actmat.errors import MergeError
from actmat.extras.ray import RayExecutor, cluster
from actmat.extras.ray.batches import Offer
from actmat.extras.ray.dispatch import ATTEMPTS, Dispatcher

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on 127.0.0.1 only; read on import
ray = pytest.importorskip("ray")
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 4 << 30}
NO_MONITORS = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
NODES = 3
MEMORY = 1 << 30
AVERAGE = {"method": "average", "scope": "all"}


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={**NODE, **NO_MONITORS})
    try:
        for _ in range(NODES - 1):
            started.add_node(**NODE, wait=False)
        started.wait_for_nodes()
        ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def test_the_cluster_is_not_seen_from_other_machines(running: Any) -> None:
    assert running.address.startswith("127.0.0.1:")
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def workers(running: Any) -> Iterator[Dispatcher]:
    """One worker per node, which tests share, because starting one takes seconds."""
    shared = Dispatcher([Offer(MEMORY, MEMORY // 2)] * NODES)
    yield shared
    shared.close()


@pytest.fixture
def shared(workers: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with the executor 'ray' use the workers of all tests."""
    monkeypatch.setattr(RayExecutor, "at", lambda address: partial(RayExecutor, workers=workers))


class TestRay(ExecutorConformance):
    workers = NODES

    @pytest.fixture(autouse=True)
    def share(self, workers: Dispatcher) -> None:
        self.dispatcher, self.has_result = workers, threading.Event()

    def make(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> Executor:
        return Noting(RayExecutor(inputs, writers, resources, workers=self.dispatcher), self)

    def trouble(self, folder: Path, what: Any, **more: Any) -> Trouble:
        (folder / "trouble").mkdir()
        return Trouble(folder / "trouble", what, **more)

    def test_a_killed_worker_is_replaced(self, tmp_path: Path) -> None:
        trouble = self.trouble(tmp_path, "kill")
        run = self._assert_same(Samples.checkpoints(tmp_path), [AVERAGE], trouble)
        (note,) = self.notes
        assert "was lost" in note
        assert "merged again" in note
        begun = trouble.begun()
        lost = begun.pop(trouble.first())
        assert {name for names in begun.values() for name in names} >= set(lost), "units of the dead are not done again"
        assert len(run.records) == len(run.units)

    def test_a_removed_node_is_done_without(self, tmp_path: Path, running: Any) -> None:
        trouble = self.trouble(tmp_path, "pause")
        victim = next(node for node in running.worker_nodes)

        def remove() -> None:
            if self.has_result.wait(60):
                running.remove_node(victim)

        thread = threading.Thread(target=remove)
        thread.start()
        try:
            self._assert_same(Samples.checkpoints(tmp_path), [AVERAGE], trouble)
        finally:
            thread.join()
            running.add_node(**NODE)
        assert all("was lost" in note for note in self.notes), "none where its worker had nothing left to do"

    @pytest.mark.slow  # starts a worker for every attempt
    def test_a_unit_that_kills_every_worker_is_named(self, tmp_path: Path) -> None:
        samples = Samples.checkpoints(tmp_path)
        with self._opened(samples, [AVERAGE], "out") as (run, executor):
            worst = run.units[3].name
            trouble = self.trouble(tmp_path, "kill always", item=worst)
            run.spec = dataclasses.replace(run.spec, observers=trouble)
            with pytest.raises(MergeError, match=rf"{ATTEMPTS} workers were lost while merging '{worst}'"):
                run.take(executor.run(run.spec, run.units))
            assert len(run.records) > len(run.units) // 2, "results of other units are lost"


class Noting:
    """An executor that tells the test of its first result and of the `notes` of all."""

    def __init__(self, executor: Executor, test: TestRay) -> None:
        self._executor, self._test, test.notes = executor, test, []
        self.survey = executor.survey

    def run(self, spec: Any, units: Any) -> Iterator[UnitResult]:
        with contextlib.closing(self._executor.run(spec, units)) as results:
            for result in results:
                self._test.notes += result.notes
                self._test.has_result.set()
                yield result
                del result


@pytest.mark.usefixtures("shared")
def test_a_diagnosed_run_writes_the_bytes_of_threads(tmp_path: Path) -> None:
    family = Family.make(tmp_path)
    fields: dict[str, Any] = {"durable": False, "diagnose": True, "out": tmp_path / "out"}
    package.merge(family.base, family.experts, executor="ray", **fields)
    package.merge(family.base, family.experts, **{**fields, "out": tmp_path / "threads"})
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "threads")]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("shared")
def test_a_recipe_names_its_executor_and_is_the_same_recipe(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {family.base}\nexperts: {[str(e) for e in family.experts]}\nexecutor: ray\n")
    actmat(["merge", recipe, "--out", family.out], code=0)
    assert "executor" not in (family.out / "actmat_manifest.json").read_text()
    actmat(["merge", recipe, "--out", family.out, "--set", "executor=threads"], code=0)


@pytest.mark.slow
def test_another_cluster_is_not_connected_to(running: Any) -> None:
    assert not cluster.connect(running.address)
    assert not cluster.connect("")
    with pytest.raises(MergeError, match="is connected to the Ray cluster"):
        cluster.connect("192.0.2.9:6379")


DRIVER = """
import os, signal, sys
from actmat.checkpoints.writing import staging
from actmat.cli.main import main

record, count = staging.Staging.record, 0

def killed(self, entry):
    global count
    record(self, entry)
    count += 1
    if count == 5:
        os.kill(os.getpid(), int(os.environ["END"]))

staging.Staging.record = killed
main()
"""


@pytest.mark.slow  # two drivers, each with workers of its own
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_driver_goes_on(end: signal.Signals, running: Any, workers: Dispatcher, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=6)
    package.merge(family.base, family.experts, out=tmp_path / "expected", durable=False)
    workers.close()  # they hold all cores
    argv = ["merge", "-b", str(family.base), "--out", str(family.out), "--set", f"executor=ray={running.address}"]
    argv += [x for e in family.experts for x in ("-e", str(e))]
    driver = [sys.executable, "-c", DRIVER, *argv]
    ended = subprocess.run(driver, capture_output=True, text=True, timeout=300, env={**os.environ, "END": f"{end:d}"})
    assert abs(ended.returncode) % 128 == end, ended.stderr
    assert not family.out.exists()
    said = actmat(argv, code=0)
    kept = re.search(r"(\d+) tensors are done and intact", said.err.replace("\n", " "))
    assert int(kept[1]) == 5 if end == signal.SIGKILL else int(kept[1]) >= 5
    found, expected = contents(family.out), contents(tmp_path / "expected")
    assert found["model.safetensors"] == expected["model.safetensors"]
