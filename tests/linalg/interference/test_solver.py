"""Interference solved on dense and on low-rank deltas: formulae, float32, batches, retries."""

import functools
import itertools

import pytest
import torch
from tests.helpers.interference import EPS32, naive, self_grams
from tests.helpers.lapack import failing
from tests.helpers.spectra import random_deltas, random_lowrank, shared_rows
from tests.tolerances import relative_error

from actmat.errors import NumericalError, StatisticsError
from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule
from actmat.linalg.interference.solver import finish, prepare, solve_lowrank, solve_lowrank_with_grams
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged, get_method

# The solver against the naive float64 formula, over forms, filters, fills, shapes and batches.


SOLVERS = ["auto", "eigh", "stacked", "dual"]
SHAPES = [(4, 12, 12), (3, 30, 10), (3, 4, 20), (2, 10, 16), (1, 6, 9)]  # T, O, I: full, tall, T O < I, wide, single
FILTERS = {
    "hard": (Filter(), None),
    "tikhonov": (Filter("tikhonov", ridge=0.3), lambda values, mean: values / (values + 0.3 * mean)),
    "exponential": (Filter("exponential", time=0.7), lambda values, mean: 1 - torch.exp(-0.7 * values / mean)),
}


def solve(deltas, rule, **given):
    return Merged(*finish(prepare(deltas, rule, **given), rule, consume=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_form_equals_the_naive_formula(shape, solver):
    deltas = random_deltas(*shape)
    weights = [0.5 + t for t in range(shape[0])]
    total = sum(w * d for w, d in zip(weights, deltas, strict=True))
    trace = sum(w * float(torch.trace(k)) for w, k in zip(weights, self_grams(deltas), strict=True))
    for name, null in itertools.product(FILTERS, ("zero", "sum", "mean")):
        spectral, response = FILTERS[name]
        expected = naive(
            deltas,
            self_grams(deltas),
            weights=weights,
            response=None if response is None else functools.partial(response, mean=trace / shape[2]),
            fill={"zero": None, "sum": total, "mean": total / sum(weights)}[null],
        )
        found = solve(deltas, InterferenceRule(spectral=spectral, null=null, solver=solver), weights=weights)
        assert relative_error(found.value, expected) < 1e-11, (name, null)


@pytest.mark.parametrize("estimator", [Estimator(center=True), Estimator(power=0.5), Estimator(normalize="norm")])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(3, 12, 8), (3, 3, 20)])
def test_estimators_in_every_form(estimator, solver, shape):
    deltas = random_deltas(*shape)
    factors = [estimator.factor(d)[0] for d in deltas]
    grams = [f.T @ f * estimator.weight(float(d.norm() ** 2)) for f, d in zip(factors, deltas, strict=True)]
    found = solve(deltas, InterferenceRule(estimator, solver=solver))
    assert relative_error(found.value, naive(deltas, grams)) < 1e-11


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cutoff_means_the_same_in_every_form_and_dtype(solver, dtype):
    """Known spectrum: relative eigenvalues 10^-(8k/23); those above 24 eps(float32) stay, whatever computes them."""
    deltas = [d.to(dtype) for d in shared_rows(4, 24, 1e-4)]
    relative_eigenvalues = torch.logspace(0, -8, 24, dtype=torch.float64)
    rank = int((relative_eigenvalues > 24 * EPS32).sum())
    assert 0 < rank < 24
    stats = solve(deltas, InterferenceRule(solver=solver)).stats
    assert stats["rank"] == rank
    assert stats["rtol"] == 24 * EPS32
    assert stats["cutoff"] == pytest.approx(4 * 24 * EPS32, rel=1e-3)


def test_given_cutoff_moves_the_rank():
    deltas = shared_rows(4, 24, 1e-4)
    ranks = [solve(deltas, InterferenceRule(spectral=Filter(rtol=r))).stats["rank"] for r in (0.0, 1e-6, 1e-3, 0.9)]
    assert ranks == [24, 18, 9, 1]


def test_the_certified_solve_is_taken_only_where_the_cutoff_does_nothing():
    flat, steep = shared_rows(3, 16, 0.1), shared_rows(3, 16, 1e-4)
    for deltas, solver in ((flat, "primal/cholesky"), (steep, "primal/eigh")):
        rule = InterferenceRule()
        found = solve(deltas, rule)
        assert found.stats["solver"] == solver
        assert relative_error(found.value, solve(deltas, InterferenceRule(solver="eigh")).value) < 1e-9


def test_accuracy_of_the_forms_on_a_steep_spectrum():
    """Singular values down to 5e-3 in float32: squaring costs eps / s^2, stacking less (in the mean: BLAS differ)."""
    errors: dict[str, list[float]] = {"eigh": [], "stacked": []}
    for seed in range(10):
        deltas = [d.float() for d in shared_rows(3, 16, 5e-3, seed)]
        expected = solve([d.double() for d in deltas], InterferenceRule(spectral=Filter(rtol=0.0))).value
        for solver, found in errors.items():
            found.append(relative_error(solve(deltas, InterferenceRule(solver=solver)).value, expected))
    assert max(errors["eigh"]) < EPS32 / 5e-3**2
    assert sum(errors["stacked"]) < sum(errors["eigh"]) / 3


@pytest.mark.parametrize("shape", [(700, 24), (40, 640), (330, 640)])
def test_sides_of_panels(shape, monkeypatch):
    """Sides at which symmetric products are cut in panels, both ways to form B, and results written panel by panel."""
    monkeypatch.setattr("actmat.linalg.interference.spectral_solve.PANEL_ROWS", 256)
    deltas = random_deltas(2, *shape)
    expected = naive(deltas, self_grams(deltas), fill=sum(deltas))
    found = solve(deltas, InterferenceRule(null="sum", solver="eigh"))
    assert relative_error(found.value, expected) < 1e-10


@pytest.mark.parametrize("null", ["zero", "sum"])
@pytest.mark.parametrize("shape", [(6, 8), (3, 40), (20, 8)])
def test_batches_are_independent_problems(shape, null):
    rule = InterferenceRule(Estimator(normalize="norm"), null=null)
    deltas = random_deltas(3, 2, 2, *shape)
    deltas[1][0, 1] = 0.0
    found = solve(deltas, rule)
    assert found.value.shape == (2, 2, *shape)
    for i, j in itertools.product(range(2), repeat=2):
        assert torch.equal(found.value[i, j], solve([d[i, j] for d in deltas], rule).value)


def test_finish_leaves_the_state_for_the_next_variant_and_decomposes_once(monkeypatch):
    calls = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (calls.append(1), real(m))[1])
    deltas = shared_rows(3, 12, 1e-5)
    variants = [
        InterferenceRule(null="sum"),
        InterferenceRule(null="mean", spectral=Filter(rtol=1e-3)),
        InterferenceRule(null="sum", spectral=Filter("adaptive")),
        InterferenceRule(null="sum", spectral=Filter("exponential", time=2.0)),
        InterferenceRule(null="sum", spectral=Filter("tikhonov")),
    ]
    assert len({v.moments_key() for v in variants}) == 1
    state = prepare(deltas, variants[0])
    shared = [finish(state, v)[0] for v in variants]
    assert len(calls) == 1
    for rule, value in zip(variants, shared, strict=True):
        assert torch.equal(value, finish(state, rule)[0])
        assert relative_error(value, solve(deltas, rule).value) < 1e-12


def test_retries_are_recorded(monkeypatch):
    calls = failing(monkeypatch, "eigh")
    stats = solve([d.float() for d in shared_rows(2, 8, 1e-5)], InterferenceRule()).stats
    assert calls == [torch.float64, torch.float64]  # the solver decomposes in float64 from the start
    assert stats["retries"] == "jitter"


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["hard", "tikhonov", "exponential", "adaptive"])
@pytest.mark.parametrize("null", ["zero", "sum"])
def test_zero_deltas_give_exact_zeros(solver, name, null):
    rule = InterferenceRule(Estimator(normalize="norm"), Filter(name), null, solver)
    found = solve([torch.zeros(3, 8)] * 2, rule)
    assert torch.equal(found.value, torch.zeros(3, 8))
    assert found.stats["norm"] == 0


def test_scale_of_all_estimates_changes_nothing():
    deltas = random_deltas(3, 6, 9)
    for spectral in (Filter(), Filter("tikhonov"), Filter("exponential"), Filter("adaptive")):
        rule = InterferenceRule(spectral=spectral, null="mean")
        scaled = solve(deltas, rule, weights=[7.0, 7.0, 7.0]).value
        assert relative_error(scaled, solve(deltas, rule).value) < 1e-12


def test_weight_zero_leaves_an_expert_out():
    deltas = random_deltas(3, 6, 5)
    kept = solve(deltas[:2], InterferenceRule(null="mean")).value
    assert relative_error(solve(deltas, InterferenceRule(null="mean"), weights=[1, 1, 0]).value, kept) < 1e-12


def test_tiny_ridge_on_a_singular_matrix_is_still_that_ridge():
    """In float32 the ridge is below the rounding of S: float64 or the spectrum takes over, the formula stays."""
    deltas = [d.float() for d in random_deltas(1, 3, 8)]
    found = solve(deltas, InterferenceRule(spectral=Filter("tikhonov", ridge=1e-12)))
    assert relative_error(found.value, deltas[0]) < 1e-3


def test_record_of_a_batch_gives_the_extremes():
    steep, flat = shared_rows(2, 8, 1e-5), shared_rows(2, 8, 0.5)
    stats = solve([torch.stack(pair) for pair in zip(steep, flat, strict=True)], InterferenceRule()).stats
    assert stats["rank"] < stats["rank_max"] == 8
    assert stats["solver"] == "primal/cholesky | primal/eigh"


class TestGivenGrams:
    def grams(self, count: int, width: int) -> list[torch.Tensor]:
        return [g @ g.T for g in random_deltas(count, width, width, seed=5)]

    def test_per_trace(self):
        deltas, grams = random_deltas(3, 4, 6), self.grams(3, 6)
        found = solve(deltas, InterferenceRule(per_trace=True), grams=grams)
        assert relative_error(found.value, naive(deltas, [g / g.trace() for g in grams])) < 1e-11

    def test_one_gram_serves_a_batch_or_one_each(self):
        deltas, grams = random_deltas(2, 3, 4, 6), self.grams(2, 6)
        shared = solve(deltas, InterferenceRule(), grams=grams).value
        each = solve(deltas, InterferenceRule(), grams=[g.expand(3, 6, 6) for g in grams]).value
        assert torch.equal(shared, each)

    @pytest.mark.parametrize("shape", [(5, 5), (6,), (2, 6, 6)])
    def test_wrong_shapes_are_refused(self, shape):
        with pytest.raises(StatisticsError, match=r"\(6, 6\)"):
            prepare(random_deltas(1, 4, 6), InterferenceRule(), grams=[torch.ones(shape)])

    def test_wrong_number_is_refused(self):
        with pytest.raises(StatisticsError, match="one Gram matrix per expert"):
            prepare(random_deltas(2, 4, 6), InterferenceRule(), grams=self.grams(1, 6))


class TestRefusals:
    @pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")]])
    def test_weights(self, weights):
        with pytest.raises(ValueError, match="weight"):
            prepare(random_deltas(2, 3, 3), InterferenceRule(), weights=weights)

    def test_no_experts(self):
        with pytest.raises(ValueError, match="at least one expert"):
            prepare([], InterferenceRule())

    def test_mean_of_weightless_experts(self):
        with pytest.raises(ValueError, match="sum of the weights"):
            solve(random_deltas(2, 3, 3), InterferenceRule(null="mean"), weights=[0.0, 0.0])

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_values_that_are_not_finite(self, bad):
        deltas = random_deltas(2, 3, 3)
        deltas[1][0, 0] = bad
        with pytest.raises(NumericalError, match="expert 1"):
            prepare(deltas, InterferenceRule())

    def test_overflow_is_an_error(self):
        with pytest.raises(NumericalError):
            solve([torch.tensor([[3e38, 3e38]]), torch.tensor([[3e38, -3e38]])], InterferenceRule())


# Low-rank deltas against the dense rule on the same matrices.


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
    deltas, rule = random_lowrank([2, 3, 5], *shape), RULES[name]
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
    _, stats = solve_lowrank(random_lowrank([2, 2], 10, 300), InterferenceRule())
    assert stats["rtol"] == 300 * EPS32


def test_trim_is_refused_by_name():
    with pytest.raises(ValueError, match="'trim' is not available for low-rank"):
        get_method("actmat").lowrank.merge(random_lowrank([2], 5, 6), trim=0.5)


@pytest.mark.parametrize("rule", [
    InterferenceRule(),
    InterferenceRule(spectral=Filter("tikhonov", ridge=0.001), prior=4.0),
    InterferenceRule(per_trace=True, prior=0.5),
    InterferenceRule(spectral=Filter("tikhonov", ridge=0.01), prior=1.0, off_diagonal=0.9),
])  # fmt: skip
@pytest.mark.parametrize("rows", [(4, 1, 3), (9, 20, 1)])
def test_rows_in_place_of_their_grams(rule, rows):
    """Few rows are solved in the dual form, many by their Gram matrices; both give the naive formula's answer."""
    deltas = [*random_lowrank([2, 3], 20, 30), LowRank(torch.zeros(20, 2).double(), torch.ones(2, 30).double())]
    roots = [random_deltas(1, n, 30, seed=n)[0] for n in rows]
    grams, weights = [z.T @ z for z in roots], [1.0, 2.0, 0.5]
    value, stats = solve_lowrank_with_grams(deltas, grams, rule, weights=weights, roots=roots)
    few = rule.off_diagonal == 1 and sum(rows) + 5 < 30
    assert str(stats["solver"]).startswith("dual/" if few else "primal/")
    estimates, dense = [], [d.dense() for d in deltas]
    for own, gram in zip(self_grams(dense), grams, strict=True):
        term = gram / gram.trace() if rule.per_trace else gram
        if own.trace() > 0:
            term = term + rule.prior * term.trace() / own.trace() * own
        estimates.append(rule.off_diagonal * term + (1 - rule.off_diagonal) * torch.diag(term.diagonal()))
    level = rule.spectral.ridge * sum(w * float(e.trace()) for w, e in zip(weights, estimates, strict=True)) / 30
    response = (lambda values: values / (values + level)) if rule.spectral.kind == "tikhonov" else None
    expected = naive(dense, estimates, weights=weights, response=response)
    assert relative_error(value.dense(), expected) < 1e-10
