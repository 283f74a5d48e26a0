"""Batched decompositions: the same bits, batches of equal shapes, and errors that reach the unit that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.tolerances import F32_PRODUCT, F64_IDENTITY
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from actmat.engine.executors import lockstep
from actmat.engine.executors.batches import BATCH, batches_of
from actmat.engine.executors.lockstep import Lockstep, in_lockstep
from actmat.engine.units import Unit
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lapack import economy_svd, eigh, only_eigenvalues, only_singular_values
from actmat.planning.model import Item, MergePlan, MethodCall
from actmat.recipe import make_recipe


def matrix(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Lockstep]:
    """Every `Lockstep` that is made."""
    made: list[Lockstep] = []

    def make(running: int) -> Lockstep:
        made.append(Lockstep(running))
        return made[-1]

    monkeypatch.setattr(lockstep, "Lockstep", make)
    return made


def decompositions(a: Tensor) -> list[Tensor]:
    """All kinds, each of the result of the one before, with a product on the way."""
    values, vectors, _ = eigh(a @ a.mT)
    u, s, vh, _ = economy_svd(vectors[:, : a.shape[0] // 2] @ a[: a.shape[0] // 2])
    few, _ = only_eigenvalues(u @ u.mT)
    last, _ = only_singular_values(vh)
    return [values, vectors, u, s, vh, few, last, vectors.mT @ a]


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks on the CPU too."""
    monkeypatch.setattr(lockstep, "STACKED_ON", ("cpu",))


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 8), (32, 40), (7, 5)])
def test_stacks_give_what_single_calls_do(steps: list[Lockstep], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The same bits where the matrices of a stack are aligned; else the same up to rounding."""
    given = [matrix(t, *shape, dtype=dtype) for t in range(4)]
    found: dict[int, list[Tensor]] = {}
    in_lockstep([lambda t=t: found.update({t: decompositions(given[t])}) for t in range(4)])
    assert steps[0].sizes == [4, 4, 4, 4], "one batch of all for every decomposition"
    tolerance = F64_IDENTITY if dtype == torch.float64 else F32_PRODUCT
    for t, a in enumerate(given):
        for mine, alone in zip(found[t], decompositions(a), strict=True):
            assert mine.stride() == alone.stride(), "another layout would take another way through a product"
            assert torch.equal(mine, alone) or shape == (7, 5)
        values, vectors = (x.double() for x in found[t][:2])
        exact = a.double() @ a.double().mT
        assert float((vectors @ values.diag() @ vectors.mT - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 5), (7, 7), (33, 40)])
def test_on_a_cpu_the_bits_are_those_of_single_calls(
    steps: list[Lockstep], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    given = [matrix(t, *shape, dtype=dtype) for t in range(4)]
    found: dict[int, list[Tensor]] = {}
    in_lockstep([lambda t=t: found.update({t: decompositions(given[t])}) for t in range(4)])
    assert steps[0].sizes == [4, 4, 4, 4], "one batch of all for every decomposition"
    for t, a in enumerate(given):
        for mine, alone in zip(found[t], decompositions(a), strict=True):
            assert torch.equal(mine, alone)
            assert mine.stride() == alone.stride(), "another layout would take another way through a product"


def test_only_equal_shapes_are_stacked_and_nobody_waits_for_those_that_are_done(steps: list[Lockstep]) -> None:
    done: list[str] = []

    def twice(shape: int, name: str) -> None:
        for seed in range(2):
            eigh(matrix(seed, shape, shape))
        done.append(name)

    in_lockstep([lambda: twice(4, "a"), lambda: twice(4, "b"), lambda: twice(5, "c"), lambda: done.append("d")])
    assert sorted(done) == ["a", "b", "c", "d"]
    assert sorted(steps[0].sizes) == [1, 1, 2, 2]


def test_one_thread_at_a_time_is_awake() -> None:
    inside, most, guard = [0], [0], threading.Lock()

    def work() -> None:
        for seed in range(5):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            _ = matrix(seed, 30, 30) @ matrix(seed, 30, 30)
            with guard:
                inside[0] -= 1
            eigh(matrix(seed, 8, 8))

    in_lockstep([work] * 1 + [lambda: work() for _ in range(5)])
    assert most == [1]


def test_an_error_ends_its_work_only_and_is_raised_in_the_end() -> None:
    done: list[int] = []

    def work(t: int) -> None:
        eigh(matrix(t, 4, 4))
        if t == 1:
            raise KeyError(t)
        eigh(matrix(t, 4, 4))
        done.append(t)

    with pytest.raises(KeyError, match="1"):
        in_lockstep([lambda t=t: work(t) for t in range(3)])
    assert sorted(done) == [0, 2]


def test_a_single_work_runs_where_it_is_called() -> None:
    names: list[str] = []
    in_lockstep([lambda: names.append(threading.current_thread().name)])
    assert names == [threading.current_thread().name]


@pytest.mark.usefixtures("stacked")
@pytest.mark.parametrize("problem", [LinAlgError("did not converge"), torch.OutOfMemoryError("too large together")])
def test_a_batch_that_fails_is_decomposed_one_by_one(
    steps: list[Lockstep], monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    original: Callable[..., Any] = torch.linalg.eigh

    def only_single(a: Tensor) -> Any:
        if a.ndim == 3:
            raise problem
        return original(a)

    monkeypatch.setattr(torch.linalg, "eigh", only_single)
    found: dict[int, Tensor] = {}
    in_lockstep([lambda t=t: found.update({t: eigh(matrix(t, 6, 6)).vectors_NN}) for t in range(3)])
    assert steps[0].sizes == [3]
    assert all(torch.equal(found[t], original(matrix(t, 6, 6))[1]) for t in range(3))


@pytest.mark.usefixtures("stacked")
def test_one_that_does_not_converge_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, as without a batch; the others are as they were."""
    original: Callable[..., Any] = torch.linalg.eigh

    def fails(a: Tensor) -> Any:
        if a.dtype == torch.float32 and bool((a == 1).all(-1).all(-1).any()):
            raise LinAlgError("did not converge")
        return original(a)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    given = [torch.ones(4, 4), matrix(1, 4, 4, dtype=torch.float32)]
    found: dict[int, tuple[str, ...]] = {}
    in_lockstep([lambda t=t: found.update({t: eigh(given[t]).retries}) for t in range(2)])
    assert found == {0: ("float64",), 1: ()}


# Which units are batched


def unit_of(plan: MergePlan, n: int, device_bytes: int = 10) -> Unit:
    return Unit(((((0, n)),),), plan.items[n].name, 1, 1, device_bytes=device_bytes)


def plan_of(shapes: Sequence[tuple[int, ...]], methods: Sequence[str] = (), pools: Sequence[str] = ()) -> MergePlan:
    names = [*methods, *["actmat"] * (len(shapes) - len(methods))]
    pooled = [*pools, *[""] * (len(shapes) - len(pools))]
    items = tuple(
        Item(f"t{n}", s, TensorLayout(Role.LINEAR, ""), "merge", "", (), MethodCall(m, {}), pool=p)
        for n, (s, m, p) in enumerate(zip(shapes, names, pooled, strict=True))
    )
    return MergePlan(make_recipe({"base": "b", "experts": ["e"]}), "model", None, (), items, (), 1)


def sizes(plan: MergePlan, n_devices: int = 1, room: int = 1000, device_bytes: int = 10) -> list[list[str]]:
    units = [unit_of(plan, n, device_bytes) for n in range(len(plan.items))]
    return [[u.name for u in batch] for batch in batches_of(units, [plan], n_devices, room)]


def test_units_of_one_shape_and_method_make_a_batch() -> None:
    plan = plan_of([(4, 4), (5, 4), (4, 4), (4, 4)], ["actmat", "actmat", "tsv"])
    assert sizes(plan) == [["t0", "t3"], ["t1"], ["t2"]]


def test_every_device_gets_a_share_and_no_more_than_it_holds() -> None:
    plan = plan_of([(4, 4)] * 6)
    assert [len(b) for b in sizes(plan, n_devices=2)] == [3, 3]
    assert [len(b) for b in sizes(plan, n_devices=4)] == [2, 2, 2]
    assert [len(b) for b in sizes(plan, room=45)] == [4, 2]
    assert [len(b) for b in sizes(plan, room=5)] == [1] * 6, "one that is too large is somebody else's problem"
    assert [len(b) for b in sizes(plan_of([(4, 4)] * (BATCH + 1)))] == [BATCH, 1]


def test_large_ones_pools_and_methods_without_matrices_stay_alone() -> None:
    assert [len(b) for b in sizes(plan_of([(600, 600)] * 2))] == [1, 1]
    assert [len(b) for b in sizes(plan_of([(4, 4)] * 2, ["ties", "ties"]))] == [1, 1]
    assert [len(b) for b in sizes(plan_of([(4, 4)] * 2, pools=["p", "q"]))] == [1, 1]
