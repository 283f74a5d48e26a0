"""The parts of the executor 'ray' that need no cluster: batches, sizes of workers, a worker, shared storage."""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.merging import Family
from tests.helpers.sessions import run_here

from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.executors import find_executor
from actmat.engine.session import SessionSpec, UnitResult
from actmat.engine.units import Unit
from actmat.errors import MergeError, OutputError, RecipeError
from actmat.extras.ray.batches import (
    BATCH_SECONDS,
    BATCH_UNITS,
    Node,
    Offer,
    UnitBatch,
    make_batches,
    plan_offers,
    unit_seconds,
)
from actmat.extras.ray.cluster import connect
from actmat.extras.ray.shared import prepared_storage, storage_problems
from actmat.extras.ray.worker import Answer, Opening, Worker

GB = 10**9


def unit(name: str = "w", *, seconds: float = 0.0, peak: int = GB) -> Unit:
    return Unit(((0, 0),), name, 0, seconds, peak)


# Batches


def test_long_units_come_first_and_alone() -> None:
    units = [unit(f"{n}", seconds=2.0 * n) for n in (1, 9, 3, 7)]
    batches = make_batches(units, workers=2)
    assert [[u.name for u in b.units] for b in batches] == [["9"], ["7"], ["3"], ["1"]]


def test_small_units_travel_together() -> None:
    units = [unit(f"{n}") for n in range(20_000)]
    batches = make_batches(units, workers=2)
    assert sum(len(b.units) for b in batches) == len(units)
    assert {u.name for b in batches for u in b.units} == {u.name for u in units}
    assert max(len(b.units) for b in batches) <= BATCH_UNITS
    assert len(batches) < 200
    assert all(sum(map(unit_seconds, b.units)) <= BATCH_SECONDS + 1e-9 for b in batches)


def test_few_small_units_still_serve_every_worker() -> None:
    units = [unit(f"{n}") for n in range(48)]
    assert len(make_batches(units, workers=3)) >= 24


# Sizes of workers


def test_one_worker_per_core_where_memory_suffices() -> None:
    units = [unit(), unit(peak=2 * GB)]
    assert plan_offers([Node(4, 100 * GB)], units, GB) == [Offer(3 * GB, GB)] * 4


def test_scarce_memory_is_shared_below_one_large_worker() -> None:
    units = [unit(peak=10 * GB), *(unit(peak=GB) for _ in range(9))]
    offers = plan_offers([Node(8, 20 * GB)], units, GB)
    assert offers[0].memory == 11 * GB
    assert len(offers) == 1 + 4
    assert sum(o.memory for o in offers) <= 20 * GB
    assert offers[0].takes(UnitBatch((units[0],)))
    assert not offers[1].takes(UnitBatch((units[0],)))
    assert offers[1].takes(UnitBatch((units[1],)))


def test_the_largest_workers_are_kept_where_their_number_is_limited() -> None:
    nodes = [Node(2, 4 * GB), Node(2, 100 * GB)]
    units = [unit(peak=5 * GB), unit()]
    (offer,) = plan_offers(nodes, units, GB, most=1)
    assert offer.takes(UnitBatch((units[0],)))


def test_a_unit_that_no_node_takes_is_named() -> None:
    units = [unit("lm_head", peak=50 * GB)]
    with pytest.raises(MergeError, match=r"'lm_head': a worker for it needs one core and 51 GB; the largest .* 20 GB"):
        plan_offers([Node(8, 20 * GB), Node(8, 10 * GB)], units, GB)


# A worker in this process


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[SessionSpec, list[Unit], list[UnitResult]]:
    """A merge with a survey that is finished; its files are prepared for workers that do it again."""
    root = tmp_path_factory.mktemp("merged")
    family = Family.make(root, layers=1)
    fields = {"base": str(family.base), "experts": [str(e) for e in family.experts], "method": "ties"}
    return run_here([fields | {"options": {"trim": "global"}}], [root / "out"])


@pytest.fixture
def opened(merged: tuple[SessionSpec, list[Unit], list[UnitResult]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`opened(**changes)`: a worker, and its answer to an opening with these changes."""
    monkeypatch.setattr(os, "chdir", lambda place: None)
    spec = dataclasses.replace(merged[0], surveys={})
    workers: list[Worker] = []

    def make(**changes: Any) -> tuple[Worker, Answer]:
        worker = Worker(lambda: "node7")
        workers.append(worker)
        given = Opening("key", {}, os.getcwd(), synchronous=True, room=GB)
        of = changes.pop("spec", spec)
        return worker, worker.open(dataclasses.replace(given, **changes), of)

    yield make
    for worker in workers:
        worker.close()


def test_a_stopped_worker_begins_nothing_until_it_is_opened_again(merged: Any, opened: Any) -> None:
    spec, units, _ = merged
    worker, _ = opened()
    worker.use(spec.surveys)
    worker.stop()
    assert worker.merge(units).results == []
    worker.open(Opening("key", {}, "", synchronous=True, room=GB), spec)
    worker.use(spec.surveys)
    assert len(worker.merge(units[:1]).results) == 1


def test_an_error_ends_the_worker_and_keeps_what_was_done(merged: Any, opened: Any) -> None:
    spec, units, _ = merged
    worker, _ = opened()
    worker.use(spec.surveys)
    wrong = dataclasses.replace(units[1], reading=None)
    answer = worker.merge([units[0], wrong, units[2]])
    assert [r.unit for r in answer.results] == units[:1]
    assert isinstance(answer.error, AssertionError)
    assert "on node node7" in answer.error.__notes__[0]
    assert worker.merge(units).results == [], "a worker that failed goes on"


def test_a_worker_that_does_not_see_the_output_says_so(merged: Any, opened: Any) -> None:
    folder = merged[0].outputs[0]
    _, answer = opened(tokens={folder: "text"})
    assert isinstance(answer.error, MergeError)
    assert "A worker does not see the files of its driver" in str(answer.error)
    assert f"node node7 does not see the output's folder {folder}" in str(answer.error)


def test_a_worker_that_does_not_see_an_input_says_so(merged: Any, opened: Any, tmp_path: Path) -> None:
    spec = merged[0]
    gone = dataclasses.replace(spec.base, address=str(tmp_path / "gone"))
    _, answer = opened(spec=dataclasses.replace(spec, base=gone, surveys={}))
    assert "A worker does not see the files of its driver" in str(answer.error)
    assert "node node7" in str(answer.error)


def test_a_worker_with_other_inputs_says_so(merged: Any, opened: Any) -> None:
    spec = merged[0]
    plan = spec.plans[0]
    files = tuple(dataclasses.replace(f, modified_ns=f.modified_ns + 1) for f in plan.experts[1].files)
    experts = (plan.experts[0], dataclasses.replace(plan.experts[1], files=files))
    _, answer = opened(spec=dataclasses.replace(spec, plans=(dataclasses.replace(plan, experts=experts),), surveys={}))
    assert "node node7 has other files at" in str(answer.error)
    assert "expert1" in str(answer.error)


def test_a_worker_with_other_software_says_so(merged: Any, opened: Any) -> None:
    spec = merged[0]
    plan = dataclasses.replace(spec.plans[0], versions={**spec.plans[0].versions, "torch": "1.0"})
    _, answer = opened(spec=dataclasses.replace(spec, plans=(plan,), surveys={}))
    assert "software differs" in str(answer.error)
    assert "the driver 1.0" in str(answer.error)


# Shared storage


def test_tokens_lie_beside_the_output_and_go(merged: Any) -> None:
    spec = merged[0]
    folder = spec.outputs[0]
    before = sorted(folder.parent.iterdir())
    with prepared_storage(spec) as tokens:
        assert tokens.keys() == {folder}
        assert storage_problems(tokens, "n") == []
        assert len(storage_problems({folder: "another"}, "n")) == 1
        assert not list(folder.glob("*token*")), "it would become part of the output"
    assert sorted(folder.parent.iterdir()) == before


def test_a_token_of_a_killed_run_is_replaced_and_no_link_is_followed(merged: Any, tmp_path: Path) -> None:
    spec = merged[0]
    folder = spec.outputs[0]
    other = tmp_path / "other"
    other.write_text("mine")
    (folder.parent / f"{folder.name}-token").symlink_to(other)
    with prepared_storage(spec) as tokens:
        assert storage_problems(tokens, "n") == []
    assert other.read_text() == "mine"


def test_attached_files_are_never_made_or_cut(merged: Any, tmp_path: Path) -> None:
    shards = merged[0].plans[0].shards
    with pytest.raises(OutputError):
        ShardWriter(tmp_path, shards, durable=False, attach="cached")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / shards[0].file
    path.write_bytes(b"short")
    with pytest.raises(OutputError, match=r"expected \d+ bytes and the header of this merge, found 5 bytes.*rm -r"):
        ShardWriter(tmp_path, shards, durable=False, attach="synchronous")
    assert path.read_bytes() == b"short"
    path.write_bytes(shards[0].header + bytes(shards[0].size - len(shards[0].header)))
    writer = ShardWriter(tmp_path, shards, durable=False, attach="synchronous")
    name, spec = next(iter(shards[0].specs.items()))
    writer.sink(name).write(memoryview(bytes([7]) * spec.nbytes))
    writer.close()
    before = shards[0].header + bytes(spec.offset - len(shards[0].header))
    after = bytes(shards[0].size - spec.offset - spec.nbytes)
    assert path.read_bytes() == before + bytes([7]) * spec.nbytes + after


# Names


def test_gpus_are_refused() -> None:
    with pytest.raises(RecipeError, match="merges on CPUs only; found the device 'cuda'"):
        find_executor("ray", "cuda")


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(RecipeError, match="takes the address HOST:PORT"):
        find_executor(f"ray={address}")


def test_executors_without_an_address() -> None:
    with pytest.raises(RecipeError, match="'threads' takes no address"):
        find_executor("threads=4")


def test_a_missing_ray_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'actmat\[ray\]'"):
        find_executor("ray")


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked, which waits for a long time"))
    with pytest.raises(MergeError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        connect("127.0.0.1:1")
