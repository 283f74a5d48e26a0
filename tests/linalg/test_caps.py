"""Caps lower larger values to the cap and keep the rest unchanged."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import F64_IDENTITY, relative_error

from actmat.linalg.caps import cap_delta, cap_lowrank
from actmat.linalg.lowrank import LowRank, weighted_sum


@pytest.mark.parametrize(("cap", "factor"), [("mean", 1.5), ("sum", 3.0), (4.0, 6.0)])
def test_norms_are_lowered_to_the_cap(cap, factor):
    unit = random_deltas(1, 4, 5)[0]
    unit = unit / unit.norm()
    capped, stats = cap_delta(100 * unit, [unit, 2 * unit], norm_cap=cap)
    assert relative_error(capped, factor * unit) < 1e-14
    assert stats == pytest.approx({"norm_before_cap": 100.0, "norm_cap": factor})
    small, _ = cap_delta(0.1 * unit, [unit, 2 * unit], norm_cap=cap)
    assert torch.equal(small, 0.1 * unit)


def factors(rows: int, columns: int, rank: int, seed: int) -> LowRank:
    return LowRank(*random_deltas(1, rows, rank, seed=seed), *random_deltas(1, rank, columns, seed=seed + 50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4), (300, 400), (2, 3, 5)])
def test_the_average_is_never_exceeded(shape, dtype):
    deltas = [d.to(dtype) for d in random_deltas(3, *shape)]
    before = [d.clone() for d in deltas]
    average = torch.stack(deltas).double().mean(0).norm()
    merged = 50 * deltas[0]
    capped, stats = cap_delta(merged, deltas, norm_cap="average")
    assert stats["norm_cap"] == pytest.approx(float(average), rel=1e-12)
    assert float(capped.double().norm()) == pytest.approx(float(average), rel=1e-6)
    assert cap_delta(deltas[0] / 50, deltas, norm_cap="average")[0].norm() == (deltas[0] / 50).norm()
    assert all(map(torch.equal, deltas, before)), "nothing is written to what is given"


@pytest.mark.parametrize("cap", ["mean", "average", "sum", 0.2, 50.0])
@pytest.mark.parametrize("shape", [(9, 12), (12, 9), (3, 12)])
def test_caps_on_factors_are_those_on_the_matrices(cap, shape):
    deltas = [factors(*shape, rank, seed=rank) for rank in (1, 2, 3)]
    merged = weighted_sum(deltas, [2.0, 1.0, -1.0])
    before = merged.b_OR.clone()
    found, stats = cap_lowrank(merged, deltas, cap)
    expected, dense_stats = cap_delta(merged.dense(), [d.dense() for d in deltas], cap)
    assert relative_error(found.dense(), expected) < F64_IDENTITY
    assert stats == pytest.approx(dense_stats)
    assert found.rank <= merged.rank
    assert torch.equal(merged.b_OR, before)


def test_caps_on_factors_keep_the_dtype():
    deltas = [factors(8, 7, 2, seed=s).to(torch.float32) for s in (1, 2)]
    found, _ = cap_lowrank(weighted_sum(deltas, [1, 1]), deltas, 0.5)
    assert found.b_OR.dtype == found.a_RI.dtype == torch.float32
