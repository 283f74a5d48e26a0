"""Panels that idle workers compute: the same results, errors raised where they belong, memory respected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.merging import contents

import actmat
from actmat.engine.executors import helpers, threads
from actmat.engine.executors.helpers import HelpersOfUnit, IdleWorkers
from actmat.engine.memory import Budget
from actmat.engine.units import Unit, long_seconds, planned_seconds
from actmat.linalg import panels
from actmat.linalg.panels import gram_panels, helped_by, multiply, row_panels, run_panels
from actmat.planning.cost import MATRIX_BYTES

ROOM = 10 * MATRIX_BYTES


class Helped:
    """Helpers on so many threads while the block runs."""

    def __init__(self, count: int, memory: int = ROOM) -> None:
        self.idle = IdleWorkers(Budget(memory), units=1)
        self._threads = [threading.Thread(target=self.idle.help) for _ in range(count)]

    def __enter__(self) -> IdleWorkers:
        for thread in self._threads:
            thread.start()
        return self.idle

    def __exit__(self, *error: object) -> None:
        self.idle.unit_ended()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "helpers go home when the last unit has ended"


@pytest.mark.parametrize("width", [1, 511, 512, 1279, 1280, 5632])
def test_gram_panels_cover_the_columns_once(width: int) -> None:
    found = gram_panels(width)
    assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
    assert found[-1].stop == width
    assert len(found) == (1 if width < 512 else max(4, width // 256))


def test_small_matrices_are_one_panel() -> None:
    assert row_panels(2047, 2048) == [slice(0, 2047)]
    assert len(row_panels(2048, 2048)) == 4
    assert row_panels(0, 5) == []


def test_panels_do_not_depend_on_who_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "SPLIT_ENTRIES", 1)
    monkeypatch.setattr(panels, "PANEL_ROWS", 16)
    rng = torch.Generator().manual_seed(0)
    left, right = torch.randn(90, 70, generator=rng), torch.randn(70, 40, generator=rng)
    torch.set_num_threads(1)
    alone, added = multiply(left, right), torch.ones(90, 40)
    multiply(left, right, added, alpha=0.5)
    assert torch.allclose(alone, left @ right, atol=1e-5)
    assert torch.allclose(added, 1 + alone / 2, atol=1e-5)
    with Helped(3) as idle, helped_by(idle):
        again = torch.ones(90, 40)
        multiply(left, right, again, alpha=0.5)
        assert torch.equal(multiply(left, right), alone)
        assert torch.equal(again, added)


class Meeting:
    """A panel in which each thread waits, once, until so many have come: no clock decides who gets a panel."""

    def __init__(self, threads: int) -> None:
        self.seen: set[int] = set()
        self.begun = threading.Event()
        self._all_here = threading.Barrier(threads, timeout=30)

    def __call__(self, own: slice) -> None:
        self.begun.set()
        if threading.get_ident() not in self.seen:
            self.seen.add(threading.get_ident())
            self._all_here.wait()


def test_idle_workers_take_panels() -> None:
    meeting = Meeting(3)
    with Helped(2) as idle, helped_by(idle):
        run_panels(meeting, [slice(k, k + 1) for k in range(12)])
    assert len(meeting.seen) == 3


def test_without_memory_nobody_helps_and_all_is_done() -> None:
    seen: set[int] = set()

    def panel(own: slice) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.02)

    with Helped(2, memory=MATRIX_BYTES - 1) as idle, helped_by(idle):
        run_panels(panel, [slice(k, k + 1) for k in range(6)])
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize("bad", [0, 5])
def test_an_error_of_any_panel_is_raised(bad: int) -> None:
    def fail(own: slice) -> None:
        time.sleep(0.01)
        if own.start == bad:
            raise ValueError("in a panel")

    with Helped(2) as idle, helped_by(idle), pytest.raises(ValueError, match="in a panel"):
        run_panels(fail, [slice(k, k + 1) for k in range(8)])


def test_long_units_are_helped_before_others_begin() -> None:
    idle = IdleWorkers(Budget(ROOM), units=2)

    def owner(first: bool, meeting: Meeting) -> None:
        with helped_by(HelpersOfUnit(idle, first=first)):
            run_panels(meeting, [slice(k, k + 1) for k in range(20)])

    for first, workers in ((False, 1), (True, 2)):
        meeting = Meeting(workers)
        thread = threading.Thread(target=owner, args=(first, meeting))
        thread.start()
        assert meeting.begun.wait(30)
        idle.help_first()
        thread.join(30)
        assert len(meeting.seen) == workers


def test_units_are_ordered_by_planned_time() -> None:
    heavy = Unit(((),), "heavy", traffic=1, host_bytes=1, flops=10**12)
    large = Unit(((),), "large", traffic=10**9, host_bytes=1)
    assert planned_seconds(heavy) > planned_seconds(large) > 0
    assert long_seconds([4.0, 2.0], workers=2) == 1.5


@pytest.fixture
def wide(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A base with one wide matrix, and two experts of it."""
    rng = torch.Generator().manual_seed(0)
    folders = [tmp_path / name for name in ("base", "one", "two")]
    base = torch.randn(96, 640, generator=rng)
    for k, folder in enumerate(folders):
        folder.mkdir()
        change = 0.01 * k * torch.randn(96, 640, generator=rng)
        save_file(
            {"model.layers.0.mlp.down_proj.weight": base + change}, folder / "model.safetensors", {"format": "pt"}
        )
    return folders[0], folders[1:]


@pytest.mark.parametrize("method", ["actmat", "actmat_ridge"])
def test_one_wide_matrix_uses_all_workers_with_the_same_bytes(
    method: str, wide: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With panels as small as these matrices need, to be fast; sizes alone decide where the cuts are."""
    for name, value in {"SPLIT_ENTRIES": 1, "PANEL_ROWS": 16, "GRAM_COLUMNS": 16, "PANELLED_FROM": 64}.items():
        monkeypatch.setattr(panels, name, value)
    monkeypatch.setattr("actmat.linalg.interference.spectral_solve.PANEL_ROWS", 16)
    helped = 0
    one = IdleWorkers._one

    def counted(self: IdleWorkers, shared: helpers._Shared) -> None:
        nonlocal helped
        helped += 1
        one(self, shared)

    taken = IdleWorkers._next

    def patient(self: IdleWorkers, shared: helpers._Shared) -> Callable[[], None] | None:
        """The owner leaves panels to the others until one of them has come, for this is no test of speed."""
        end = time.monotonic() + 30
        while workers > 1 and not helped and time.monotonic() < end:
            time.sleep(0.001)
        return taken(self, shared)

    monkeypatch.setattr(IdleWorkers, "_one", counted)
    monkeypatch.setattr(IdleWorkers, "_next", patient)
    base, experts = wide
    found = {}
    for workers in (1, 2, 4):
        out = tmp_path / f"out{workers}"
        actmat.merge(base, experts, out=out, method=method, threads=workers)
        found[workers] = contents(out)["model.safetensors"]
        if workers == 1:
            assert not helped
    assert helped, "idle workers took panels"
    assert found[1] == found[2] == found[4]


def test_a_failing_unit_sends_the_helpers_home(
    wide: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("a broken unit")

    monkeypatch.setattr(threads.Session, "merge", broken)
    base, experts = wide
    with pytest.raises(RuntimeError, match="a broken unit"):
        actmat.merge(base, experts, out=tmp_path / "out", threads=4)
    assert not [t for t in threading.enumerate() if t.name.startswith("actmat")]
