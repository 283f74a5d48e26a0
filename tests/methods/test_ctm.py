"""CtM against a transcription of its equations, its rank, its subspaces, and its exact low-rank form."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.laws import law_gap
from tests.helpers.spectra import orthonormal, random_deltas, random_lowrank
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.ctm import CTM, merge, merge_lowrank, shared_subspaces
from actmat.linalg.lowrank import truncate


def naive_subspaces(targets: list[Tensor], rank: int, sweeps: int) -> tuple[Tensor, Tensor]:
    """Full SVDs of the unfoldings of the third-order tensor."""
    u = torch.linalg.svd(torch.cat(targets, 1)).U[:, :rank]
    v = torch.linalg.svd(torch.cat([x.T for x in targets], 1)).U[:, :rank]
    for _ in range(sweeps):
        u = torch.linalg.svd(torch.cat([x @ v for x in targets], 1)).U[:, :rank]
        v = torch.linalg.svd(torch.cat([x.T @ u for x in targets], 1)).U[:, :rank]
    return u, v


def naive(deltas: list[Tensor], rank: int, balance: float, rule: str, density: float, sweeps: int = 25) -> Tensor:
    deltas = [d.double() for d in deltas]
    norms = [float(d.norm()) for d in deltas]
    mean = sum(norms) / len(norms)
    targets = [(balance * n + (1 - balance) * mean) * d / n for d, n in zip(deltas, norms, strict=True)]
    u, v = naive_subspaces(targets, rank, sweeps)
    parts = [u.T @ d @ v for d in deltas]
    if rule != "ties":
        return u @ (sum(parts) / (len(parts) if rule == "average" else 1)) @ v.T
    kept = int(density * rank * rank) + 1
    for part in parts:
        least = part.abs().flatten().sort(descending=True).values[min(kept, rank * rank) - 1]
        part[part.abs() < least] = 0
    merged = torch.zeros(rank, rank).double()
    for i in range(rank):
        for j in range(rank):
            votes = [float(p[i, j]) for p in parts]
            agreeing = [x for x in votes if x * sum(votes) > 0]
            merged[i, j] = sum(agreeing) / len(agreeing) if agreeing else 0.0
    return u @ merged @ v.T


@pytest.mark.parametrize("shape", [(3, 14, 14), (2, 9, 20), (4, 20, 9)])
@pytest.mark.parametrize("rule", ["ties", "sum", "average"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64_ORACLE), (torch.float32, 2e-5)])
def test_equals_the_equations(shape, rule, dtype, bound):
    deltas = [(1 + t) * d for t, d in enumerate(random_deltas(*shape, dtype=dtype))]
    found = merge(deltas, rank=4, rule=rule, sweeps=3)
    assert found.value.dtype == dtype
    assert found.stats["rank_max"] == 4
    assert relative_error(found.value, naive(deltas, 4, 0.25, rule, 0.25, sweeps=3)) < bound


@pytest.mark.parametrize(("balance", "density"), [(0.0, 0.5), (1.0, 0.1), (0.5, 0.8)])
def test_options(balance, density):
    deltas = [(1 + 5 * t) * d for t, d in enumerate(random_deltas(3, 12, 10))]
    found = merge(deltas, rank=5, balance=balance, density=density, sweeps=2).value
    assert relative_error(found, naive(deltas, 5, balance, "ties", density, sweeps=2)) < F64_ORACLE


def test_the_rank_is_kept_by_construction():
    deltas = random_lowrank(4, 40, 30, rank=6)
    for rank in (1, 6, 17):
        found = merge_lowrank(deltas, rank=rank)
        assert found.value.rank == rank
        assert truncate(found.value, rank).error <= F64_ORACLE * float(found.value.dense().norm())


def test_sweeps_find_better_subspaces_and_come_to_rest():
    deltas = random_deltas(4, 16, 14)

    def captured(sweeps: int) -> float:
        left, right, _, _ = shared_subspaces(deltas, 3, sweeps, torch.float64)
        return sum(float((left.T @ d @ right).square().sum()) for d in deltas)

    start, later, last, beyond = (captured(s) for s in (0, 5, 200, 201))
    assert start < later <= last
    assert beyond == pytest.approx(last, rel=1e-10)


def test_a_quiet_expert_keeps_its_direction():
    """Truncation of the sum drops the quiet expert, the balanced subspaces do not."""
    left, right = orthonormal(20, 2, 1), orthonormal(18, 2, 2)
    loud, quiet = (100 ** (1 - i) * torch.outer(left[:, i], right[:, i]) for i in (0, 1))
    noise = [0.3 * d / d.norm() for d in random_deltas(2, 20, 18)]
    loud = loud + 10 * noise[0]
    kept = {
        balance: float(left[:, 1] @ merge([loud, quiet], rank=2, rule="sum", balance=balance).value @ right[:, 1])
        for balance in (0.0, 1.0)
    }
    assert kept[0.0] > 0.9
    assert kept[1.0] < 0.5


def test_experts_in_the_same_subspaces_lose_nothing():
    u, v = orthonormal(15, 3, 5), orthonormal(11, 3, 6)
    deltas = [u @ d @ v.T for d in random_deltas(3, 3, 3)]
    assert relative_error(merge(deltas, rank=3, rule="average").value, sum(deltas) / 3) < 1e-12
    assert relative_error(merge(deltas, rank=8, rule="sum").value, sum(deltas)) < 1e-12
    assert merge(deltas, rank=8).stats["rank_max"] == 3


def test_experts_apart_do_not_halve_one_another():
    """Coordinates that are rounding have no vote: TIES would else divide by the number of experts."""
    u, v = orthonormal(20, 8, 3), orthonormal(16, 8, 4)
    deltas = [
        u[:, own] @ torch.diag(torch.tensor(values).double()) @ v[:, own].T
        for own, values in ((slice(0, 2), [8.0, 7.0]), (slice(2, 4), [6.0, 5.0]), (slice(4, 6), [4.0, 3.0]))
    ]
    assert relative_error(merge(deltas, rank=6, density=0.3).value, sum(deltas)) < 1e-12


@pytest.mark.parametrize("law", sorted(CTM.laws))
@pytest.mark.parametrize("rule", ["ties", "sum"])
def test_declared_laws(law, rule):
    assert law_gap(law, lambda d: merge(d, rank=4, rule=rule).value, random_deltas(3, 16, 13)) < F64_ORACLE


def test_zero_experts():
    deltas = [*random_deltas(2, 9, 8), torch.zeros(9, 8).double()]
    assert bool(merge(deltas, rank=3).value.isfinite().all())
    assert not merge([deltas[2]] * 2).value.any()


def test_batches_are_merged_element_by_element():
    deltas = random_deltas(2, 3, 8, 6)
    deltas[0][1] = 0
    found = merge(deltas, rank=2)
    for element in range(3):
        assert relative_error(found.value[element], merge([d[element] for d in deltas], rank=2).value) < 1e-11


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (5, 40)])
@pytest.mark.parametrize("options", [{}, {"rank": 4}, {"rank": 2, "rule": "average", "balance": 1.0}])
def test_lowrank_equals_dense(shape, options):
    deltas = random_lowrank(3, *shape, rank=4)
    found = merge_lowrank(deltas, **options)
    dense = merge([d.dense() for d in deltas], **options)
    assert found.value.rank <= options.get("rank", 16)
    assert relative_error(found.value.dense(), dense.value) < 1e-10


def test_lowrank_batches():
    deltas = random_lowrank(3, 10, 12, rank=2, batch=(2, 2))
    found = merge_lowrank(deltas, rank=3)
    assert found.value.b_OR.shape == (2, 2, 10, 3)
    assert relative_error(found.value.dense(), merge([d.dense() for d in deltas], rank=3).value) < F64_ORACLE
