"""Low-rank deltas against the dense rule on the same matrices."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.interference import EPS32
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule
from actmat.linalg.interference.solver import finish, prepare, solve_lowrank, solve_lowrank_with_grams
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged, get_method


def adapters(ranks: list[int], *shape: int, dtype: torch.dtype = torch.float64) -> list[LowRank]:
    *batch, rows, columns = shape
    pairs = (
        random_deltas(1, *batch, rows, r, seed=r) + random_deltas(1, *batch, r, columns, seed=50 + r) for r in ranks
    )
    return [LowRank(b.to(dtype), a.to(dtype)) for b, a in pairs]


def dense(deltas, rule, **given):
    return Merged(*finish(prepare([d.dense() for d in deltas], rule, **given), rule, consume=True))


RULES = {
    "hard": InterferenceRule(),
    "cut": InterferenceRule(spectral=Filter(rtol=0.05)),
    "tikhonov": InterferenceRule(spectral=Filter("tikhonov"), null="sum"),
    "exponential": InterferenceRule(Estimator(normalize="norm"), Filter("exponential", time=3.0), null="mean"),
    "absolute": InterferenceRule(
        Estimator(normalize="norm"), Filter("exponential", time=3.0, time_is_absolute=True), null="sum"
    ),
    "adaptive": InterferenceRule(Estimator(normalize="norm"), Filter("adaptive"), null="sum"),
    "centered": InterferenceRule(Estimator(center=True), null="sum"),
    "centered and powered": InterferenceRule(Estimator(center=True, power=0.5)),
    "powered": InterferenceRule(Estimator(power=0.5), Filter("tikhonov")),
    "stacked": InterferenceRule(Estimator(center=True), solver="stacked"),
    "dual": InterferenceRule(solver="dual"),
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("shape", [(20, 30), (9, 30), (30, 9), (2, 12, 14)])
def test_low_rank_equals_dense(name, shape):
    """Ranks that fit in both sides, that fill the rows, and that fill the columns; a batch."""
    deltas, rule = adapters([2, 3, 5], *shape), RULES[name]
    weights = [1.0, 0.5, 2.0]
    value, stats = solve_lowrank(deltas, rule, weights=weights)
    expected = dense(deltas, rule, weights=weights)
    assert value.shape == expected.value.shape
    assert value.rank <= 10
    assert relative_error(value.dense(), expected.value) < 1e-11
    for key in ("rank", "rtol", "norm", "mean_expert_norm", "ridge", "time"):
        assert (key in stats) == (key in expected.stats)
        assert stats.get(key, 0) == pytest.approx(expected.stats.get(key, 0), rel=1e-9), key


def test_cutoff_uses_the_inputs_of_the_layer_not_of_the_basis():
    _, stats = solve_lowrank(adapters([2, 2], 10, 300), InterferenceRule())
    assert stats["rtol"] == 300 * EPS32


def test_float32_factors_come_back_in_float32_at_float32_accuracy():
    deltas = adapters([2, 3], 20, 30, dtype=torch.float32)
    value, _ = solve_lowrank(deltas, InterferenceRule())
    assert value.b_OR.dtype == value.a_RI.dtype == torch.float32
    exact, _ = solve_lowrank([d.to(torch.float64) for d in deltas], InterferenceRule())
    assert relative_error(value.dense(), exact.dense()) < 1e-6


def test_independent_row_spaces_leave_no_interference():
    """Each expert is met on its own rows, `(D* - D_t) D_t^T = 0`, so that weights and normalizer do not matter."""
    deltas = adapters([2, 3, 4], 20, 30)
    value, stats = solve_lowrank(deltas, InterferenceRule())
    assert stats["rank"] == 9
    for delta in deltas:
        assert relative_error(value.dense() @ delta.dense().T, delta.dense() @ delta.dense().T) < 1e-12
    weighted, _ = solve_lowrank(deltas, InterferenceRule(Estimator(normalize="norm")), weights=[1.0, 5.0, 0.2])
    assert relative_error(weighted.dense(), value.dense()) < 1e-12


def test_trim_is_refused_by_name():
    with pytest.raises(ValueError, match="'trim' is not available for low-rank"):
        get_method("actmat").lowrank.merge(adapters([2], 5, 6), trim=0.5)


@pytest.mark.parametrize("shape", [(20, 12), (3, 12)])
def test_given_grams_with_low_rank_deltas(shape):
    deltas = adapters([2, 3], *shape)
    halves = random_deltas(2, 5, 12, seed=7)
    grams = [h.T @ h for h in halves]  # rank 5 + 5 of 12: S is singular
    value, stats = solve_lowrank_with_grams(deltas, grams, InterferenceRule())
    expected = dense(deltas, InterferenceRule(), grams=grams)
    assert relative_error(value.dense(), expected.value) < 1e-10
    assert value.rank <= 5
    assert stats["rank"] == expected.stats["rank"] == 10
