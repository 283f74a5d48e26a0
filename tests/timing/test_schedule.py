"""The simulated schedule, against makespans by hand."""

from __future__ import annotations

import random

import pytest

from actmat.timing.schedule import Cluster, Simulation, simulate
from actmat.timing.work import Work


def run(works: list[Work], nodes: int = 1, workers: int = 2, **given: float) -> Simulation:
    return simulate(works, Cluster(nodes=nodes, workers=workers, **{"node_bandwidth": 1.0, **given}))  # type: ignore[arg-type]


def alone(name: str, seconds: float, nbytes: int = 0, host_bytes: int = 0) -> Work:
    return Work(name, nbytes, 0, serial_s=seconds, host_bytes=host_bytes)


def test_nothing_to_do() -> None:
    found = run([], start_s=2.0)
    assert (found.makespan_s, found.ideal_s, found.last, found.longest) == (2.0, 2.0, None, None)


def test_units_go_to_whoever_is_free() -> None:
    found = run([alone("a", 4.0), alone("b", 3.0), alone("c", 3.0), alone("d", 2.0)], start_s=1.0)
    assert found.makespan_s == 1.0 + 6.0
    assert found.compute_bound_s == 6.0
    assert found.efficiency == 1.0


def test_the_last_long_unit_is_named() -> None:
    found = run([alone("short", 1.0), alone("long", 9.0)])
    assert found.makespan_s == 9.0
    assert found.efficiency == pytest.approx(5 / 9)
    assert found.last is not None
    assert found.last.name == "long"
    assert found.longest == found.last


def test_storage_is_shared_fairly() -> None:
    """Both read at half the speed until the first has its 2 bytes (4 s); the other needs 2 s more for its last 2."""
    found = run([alone("a", 10.0, nbytes=2), alone("b", 0.0, nbytes=4)])
    assert found.makespan_s == 14.0
    assert found.storage_bound_s == 6.0
    only_b = run([alone("a", 0.0, nbytes=2), alone("b", 0.0, nbytes=4)])
    assert only_b.makespan_s == 6.0


def test_nodes_share_storage_evenly() -> None:
    works = [alone(str(k), 0.0, nbytes=6) for k in range(4)]
    assert run(works, nodes=2, workers=1, node_bandwidth=10.0, shared_bandwidth=4.0).makespan_s == 6.0
    assert run(works, nodes=2, workers=1, node_bandwidth=1.0, shared_bandwidth=4.0).makespan_s == 12.0
    assert run(works, nodes=2, workers=1, node_bandwidth=1.0).node_bytes == (12, 12)


def test_idle_workers_of_the_node_help() -> None:
    work = Work("wide", 0, 0, serial_s=1.0, shared_s=8.0, panels=4)
    assert run([work], workers=1).makespan_s == 9.0
    assert run([work], workers=2).makespan_s == 5.0
    assert run([work], workers=8).makespan_s == 3.0, "no more workers than panels"
    assert run([work], nodes=2, workers=1).makespan_s == 9.0, "no help from another node"


def test_long_units_are_helped_before_others_begin() -> None:
    """The worker that is free after 1 s helps for 3.5 s, and only then takes the last unit."""
    wide = Work("wide", 0, 0, serial_s=0.0, shared_s=8.0, panels=8)
    found = run([wide, alone("a", 1.0), alone("b", 1.0)])
    assert found.makespan_s == pytest.approx(5.5)
    assert found.efficiency == pytest.approx(5.0 / 5.5)


def test_peaks_are_sums_of_what_runs_together() -> None:
    works = [alone("a", 2.0, host_bytes=5), alone("b", 1.0, host_bytes=7), alone("c", 3.0, host_bytes=1)]
    found = run(works, process_bytes=100)  # type: ignore[arg-type]
    assert found.peak_bytes == (112,)


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_beats_the_bounds_and_none_wastes_much(seed: int) -> None:
    """Longest first is within 4/3 of the ideal plus the longest, on any number of workers."""
    rng = random.Random(seed)
    works = [
        Work(str(k), rng.randrange(50), 0, rng.uniform(0, 5), rng.uniform(0, 5), rng.randint(1, 8), rng.randrange(9))
        for k in range(120)
    ]
    works.sort(key=lambda w: w.seconds, reverse=True)
    for nodes, workers in ((1, 1), (1, 3), (2, 4), (5, 8)):
        found = run(works, nodes=nodes, workers=workers, node_bandwidth=40.0)
        assert found.ideal_s <= found.makespan_s * (1 + 1e-9)
        reading = sum(w.read_bytes for w in works) / (40.0 * nodes)
        assert found.makespan_s <= found.compute_bound_s * 4 / 3 + works[0].seconds + 2 * reading + 1e-6
        assert sum(found.node_bytes) == sum(w.read_bytes for w in works)
        assert max(found.peak_bytes) <= 8 * workers


def test_one_worker_does_everything_in_turn() -> None:
    works = [Work(str(k), 3, 2, 1.5, 0.5, 4) for k in range(7)]
    found = run(works, workers=1, node_bandwidth=5.0)
    assert found.makespan_s == pytest.approx(7 * (1.0 + 2.0))


def test_many_units_take_little_time() -> None:
    works = [Work(str(k), 1, 1, 1.0, 1.0, 2) for k in range(20_000)]
    found = run(works, nodes=32, workers=8, node_bandwidth=1e6)
    assert found.efficiency > 0.98
