"""Output errors from Gram matrices, and the lemma on minimizers: identity, inequality, and where it is attained."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.analyses import gaussian, gram
from tests.tolerances import F64_IDENTITY, F64_ORACLE, relative_error

from actmat.extras.collect.on_data import output_energy
from actmat_experiments.analyses.interference import relative_interference
from actmat_experiments.analyses.theorem2 import best_scale, least_interference, minimizer_gap


def test_energy_is_the_mean_square_over_samples():
    z, a, b = gaussian(50, 4), gaussian(3, 4, seed=1), gaussian(3, 4, seed=2)
    c = z.mT @ z / 50
    assert output_energy(a, c) == pytest.approx(float((z @ a.mT).square().sum(1).mean()))
    wanted = float((z @ (a - b).mT).square().sum() / (z @ b.mT).square().sum())
    assert relative_interference(a, b, c) == pytest.approx(wanted)
    assert relative_interference(a, b, 7 * c) == pytest.approx(wanted)
    assert relative_interference(b, b, c) == 0
    assert math.isnan(relative_interference(a, torch.zeros(3, 4), c))


def test_the_least_interference_is_least():
    deltas, grams = [gaussian(3, 4, seed=i) for i in range(3)], [gram(9, 4, 10 + i) for i in range(3)]

    def interference(d):
        return sum(output_energy(d - x, c) for x, c in zip(deltas, grams, strict=True))

    best = least_interference(deltas, grams)
    for i in range(20):
        assert interference(best) <= interference(best + 1e-3 * gaussian(3, 4, seed=20 + i))
    wanted = sum(d @ c for d, c in zip(deltas, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    assert relative_error(best, wanted) < F64_ORACLE


def test_best_scale_is_best():
    grams, found = [gram(9, 4, i) for i in range(3)], [gram(3, 4, 5 + i) for i in range(3)]
    factor = best_scale(grams, found)

    def error(a):
        return sum(float((c - a * k).square().sum()) for c, k in zip(grams, found, strict=True))

    assert error(factor) < min(error(1.01 * factor), error(0.99 * factor))
    assert best_scale(grams, [torch.zeros(4, 4)] * 3) == 0


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_experts=st.integers(1, 4),
    n_out=st.integers(1, 4),
    width=st.integers(1, 5),
    samples=st.integers(1, 8),
    exact=st.booleans(),
)
def test_the_lemma_holds_on_random_problems(seed, n_experts, n_out, width, samples, exact):
    """Also for singular Gram matrices (few samples) and for merges that minimize nothing."""
    deltas = [gaussian(n_out, width, seed=seed + i) for i in range(n_experts)]
    grams = [gram(samples, width, seed + 10 + i) for i in range(n_experts)]
    found = [d.mT @ d for d in deltas]
    merged = least_interference(deltas, found) if exact else gaussian(n_out, width, seed=seed + 20)
    gap = minimizer_gap(merged, deltas, grams, [best_scale(grams, found) * k for k in found])
    assert gap.gap <= gap.bound * (1 + 1e-9) + 1e-9
    if exact:
        assert gap.residual <= 1e-8 * max(1.0, sum(gap.errors))


def test_the_identity_behind_the_lemma():
    """`(D^ - D) S = sum_t (D^ - D_t)(C_t - C^_t)` for the minimizer under the estimates."""
    deltas, grams = [gaussian(3, 4, seed=i) for i in range(3)], [gram(9, 4, 10 + i) for i in range(3)]
    found = [gram(9, 4, 30 + i) for i in range(3)]
    merged = least_interference(deltas, found)
    left = (merged - least_interference(deltas, grams)) @ sum(grams)
    right = sum((merged - d) @ (c - k) for d, c, k in zip(deltas, grams, found, strict=True))
    assert relative_error(left, right) < F64_ORACLE
    gap = minimizer_gap(merged, deltas, grams, found)
    assert gap.residual < F64_IDENTITY
    values = torch.linalg.eigvalsh(sum(grams))
    assert gap.smallest == pytest.approx(float(values[0]))
    assert gap.trace_inverse == pytest.approx(float((1 / values).sum()))


def test_the_bound_is_attained_in_one_dimension():
    """Two scalar experts 0 and 1 with Gram 1 each; the second is estimated 3 times too large."""
    deltas = [torch.zeros(1, 1).double(), torch.ones(1, 1).double()]
    one = torch.ones(1, 1).double()
    merged = least_interference(deltas, [one, 3 * one])
    gap = minimizer_gap(merged, deltas, [one, one], [one, 3 * one])
    assert float(merged) == pytest.approx(0.75)
    assert gap.gap == pytest.approx(0.25)
    assert gap.bound == pytest.approx(0.25)
