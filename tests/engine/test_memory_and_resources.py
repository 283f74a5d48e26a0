"""Buffers, the memory budget, and what a run may spend."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from actmat.checkpoints.base import TensorSpec
from actmat.engine import memory
from actmat.engine.memory import MemoryBudget, Room, available_memory
from actmat.engine.resources import share_resources
from actmat.errors import RecipeError
from actmat.layout.types import Role, TensorLayout
from actmat.planning import MergePlan
from actmat.planning.cost import BASELINE_BYTES, ITEM_BYTES, SOURCE_BYTES
from actmat.planning.item import Item, ItemCost, Target, Write
from actmat.planning.work import HOST
from actmat.recipe import make_recipe


def held_bytes(room: Room) -> int:
    return 0 if room._block is None else room._block.numel()


def test_room_gives_back_what_the_next_tensor_cannot_bear_beside_it() -> None:
    room = Room(keep=1000)
    with room.opened(640, elsewhere=200):
        pass
    with room.opened(64, elsewhere=300):
        assert held_bytes(room) == 640
    with room.opened(64, elsewhere=500):
        assert held_bytes(room) == 64, "640 + 500 is more than 1000"
    with room.opened(2048, elsewhere=0):
        assert held_bytes(room) == 2048, "a tensor above the limit gets what it needs"
    assert held_bytes(room) == 0, "and leaves nothing behind"


def test_room_without_a_limit_keeps_nothing_and_unopened_gives_plain_tensors() -> None:
    room = Room()
    assert room.take(5, torch.float32).shape == (5,)
    with room.opened(640, elsewhere=0):
        assert held_bytes(room) == 640
    assert held_bytes(room) == 0


class Holder:
    """A thread that holds some of a budget until told to let go."""

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        self.inside, self.release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(budget, nbytes), daemon=True)
        self._thread.start()

    def _run(self, budget: MemoryBudget, nbytes: int) -> None:
        with budget.hold(nbytes):
            self.inside.set()
            self.release.wait(60)

    def let_go(self) -> None:
        self.release.set()
        self._thread.join(60)


def test_the_budget_admits_what_fits_and_blocks_the_rest() -> None:
    budget = MemoryBudget(100)
    first, second = Holder(budget, 60), Holder(budget, 40)
    assert first.inside.wait(60)
    assert second.inside.wait(60)
    third = Holder(budget, 50)
    assert not third.inside.wait(0.05)
    second.let_go()
    assert not third.inside.wait(0.05), "60 + 50 is still too much"
    first.let_go()
    assert third.inside.wait(60)
    third.let_go()


def test_an_item_above_the_budget_runs_alone() -> None:
    budget = MemoryBudget(100)
    small = Holder(budget, 1)
    assert small.inside.wait(60)
    giant = Holder(budget, 1000)
    assert not giant.inside.wait(0.05)
    small.let_go()
    assert giant.inside.wait(60)
    late = Holder(budget, 1)
    assert not late.inside.wait(0.05)
    giant.let_go()
    assert late.inside.wait(60)
    late.let_go()


def test_a_failure_gives_the_memory_back() -> None:
    budget = MemoryBudget(100)
    with pytest.raises(ZeroDivisionError), budget.hold(100):
        _ = 1 / 0
    with budget.hold(100):
        pass


@pytest.mark.parametrize(
    ("limit", "parts", "expected"),
    [
        ("1000", "anon 300\nactive_file 100\ninactive_file 550\n", 700),  # files that were read are no burden
        ("1000", "anon 950\nactive_file 0\ninactive_file 0\n", 50),
        ("max", "", None),
        ("1000", "anon 950\n", None),
    ],
)
def test_memory_of_a_container_is_what_its_processes_do_not_hold(
    limit: str, parts: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("max", limit), ("current", "950"), ("stat", parts)):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_memory() == expected if expected is not None else available_memory() > 1e6


def plan_of(*peaks: int) -> MergePlan:
    layout = TensorLayout(Role.LINEAR, "")
    targets = [Target(TensorSpec(f"t{n}", (1,), "float32", ""), layout) for n in range(len(peaks))]
    costs = [ItemCost(host_bytes=p) for p in peaks]
    items = tuple(Item(t, "copy", "", Write("sum"), cost=c) for t, c in zip(targets, costs, strict=True))
    return MergePlan(make_recipe({"base": "b", "experts": ["e"]}), "model", None, (), items, (), 1, {"": "model"})


def share(*peaks: int, **settings: Any) -> Any:
    chosen: dict[str, Any] = {"room": HOST, "max_memory": None, "threads": None, **settings}
    return share_resources([plan_of(*peaks)], **chosen)


def test_the_limit_is_for_the_whole_process() -> None:
    rest = 10**9 - BASELINE_BYTES - share(10, max_memory="1GB", threads=3).memory
    assert ITEM_BYTES <= rest <= ITEM_BYTES + 9 * SOURCE_BYTES, "one item and its experts are counted"
    assert share(10, threads=3).workers == 3
    assert share(10).workers >= 1
    assert share(10**15).memory == 10**15, "without a limit the largest tensor is tried, alone"


def test_too_little_memory_names_the_tensor_and_the_least_that_works() -> None:
    with pytest.raises(RecipeError) as caught:
        share(1, 10**9, 5, max_memory="1GB")
    assert "tensor 't1' alone needs 1 GB" in str(caught.value)
    assert "at least 1.3 GB" in str(caught.value)
    with pytest.raises(RecipeError, match="too little"):
        share(1, 10**9, max_memory=10**9 + BASELINE_BYTES)
    assert share(1, 10**9, max_memory=10**9 + BASELINE_BYTES + 100_000).memory >= 10**9
