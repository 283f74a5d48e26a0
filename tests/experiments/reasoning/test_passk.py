"""pass@k against enumeration of all sets of answers, and its interval."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmat_experiments.reasoning.passk import estimate, pass_at_k


def enumerated(n: int, c: int, k: int) -> Fraction:
    """Share of the sets of k answers that hold one of the first c."""
    sets = list(itertools.combinations(range(n), k))
    return Fraction(sum(any(i < c for i in chosen) for chosen in sets), len(sets))


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_all_sets_of_k_answers(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(float(enumerated(n, c, k)), abs=1e-15)


@given(st.integers(1, 400), st.data())
def test_the_product_is_the_quotient_of_binomials(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


def test_large_numbers_neither_overflow_nor_cancel() -> None:
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(100_000, 50_000, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(n, c, k)


def test_the_estimate_is_the_mean_over_problems_with_the_spread_between_them() -> None:
    found = estimate([0, 2, 4, 4], 4, 1)
    assert found.interval.value == pytest.approx(0.625)
    spread = (sum((x - 0.625) ** 2 for x in (0, 0.5, 1, 1)) / 3) ** 0.5
    assert found.interval.low == pytest.approx(0.625 - 1.959964 * spread / 2)
    assert found.interval.high == 1.0
    assert (found.k, found.n_problems, found.n_samples) == (1, 4, 4)


def test_equal_problems_do_not_make_a_point() -> None:
    nothing = estimate([0] * 10, 4, 1).interval
    assert (nothing.value, nothing.low) == (0.0, 0.0)
    assert 0.2 < nothing.high < 0.35
    assert (estimate([2], 4, 1).interval.low, estimate([2], 4, 1).interval.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no problems"):
        estimate([], 4, 1)
