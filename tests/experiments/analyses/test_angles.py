"""Angles between matrices: known values, all digits near zero, the triangle inequality, PSD within a right angle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.analyses import gaussian
from tests.tolerances import F64_IDENTITY

from actmat_experiments.analyses.angles import RIGHT_ANGLE, angle, cosine, drift_angles, gram_of


def test_known_angles():
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    assert angle(a, a) == 0
    assert angle(a, b) == pytest.approx(math.pi / 2)
    assert angle(a, -3 * a) == pytest.approx(math.pi)
    assert angle(a, a + b / 2) == pytest.approx(math.pi / 4)
    assert cosine(a, a + b / 2) == pytest.approx(math.sqrt(0.5))


def test_small_angles_keep_their_digits():
    """arccos would give 0 or 1.5e-8 for all of these."""
    a, b = torch.eye(2).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    for tilt in (1e-6, 1e-9, 1e-12):
        assert angle(a, a + tilt * b) == pytest.approx(tilt, rel=1e-3)


def test_scale_does_not_matter_even_where_squares_underflow():
    a, b = gaussian(4, 3), gaussian(4, 3, seed=1)
    assert angle(1e-200 * a, 1e150 * b) == pytest.approx(angle(a, b), rel=F64_IDENTITY)
    assert math.cos(angle(a, b)) == pytest.approx(cosine(a, b), rel=1e-10)


def test_zero_has_no_direction_and_shapes_must_agree():
    assert math.isnan(angle(torch.zeros(2, 2), torch.eye(2)))
    assert math.isnan(cosine(torch.eye(2), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(3, 3\)"):
        angle(torch.eye(2), torch.eye(3))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 6), ranks=st.tuples(*[st.integers(1, 6)] * 3))
def test_positive_matrices_lie_within_a_right_angle_and_obey_the_triangle(seed, width, ranks):
    a, b, c = (gram_of(gaussian(r, width, seed=seed % 1000 + i)) for i, r in enumerate(ranks))
    for x, y in ((a, b), (b, c), (a, c)):
        assert 0 <= angle(x, y) <= RIGHT_ANGLE + F64_IDENTITY
    assert angle(a, c) <= angle(a, b) + angle(b, c) + F64_IDENTITY


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_out=st.integers(1, 5), n_in=st.integers(1, 5))
def test_both_bounds_hold_for_any_matrices(seed, n_out, n_in):
    """The triangle inequality needs nothing of S and S~; with `D` along `G` the optimizer's angle is zero."""
    gradient, second, decoupled, gram = (
        gaussian(n_out, n_in, seed=seed),
        *(gram_of(gaussian(4, n_in, seed=seed + i)) for i in (1, 2, 3)),
    )
    along = drift_angles(-0.01 * gradient, gradient, second, decoupled, gram)
    assert along.optimizer < F64_IDENTITY
    assert along.estimate <= along.bound + F64_IDENTITY
    other = drift_angles(gaussian(n_out, n_in, seed=seed + 4), gradient, second, decoupled, gram)
    assert other.estimate <= other.full_bound + F64_IDENTITY
    assert other.full_bound == pytest.approx(other.optimizer + other.cross + other.correlation + other.drift)


def test_without_the_optimizers_angle_the_bound_can_fail():
    """So the tests above can fail too: a delta that is not along the gradient breaks Theorem 3.1's own bound."""
    e = torch.eye(2).double()
    gradient, delta = e[:1], e[1:]
    gram = gram_of(gradient)
    found = drift_angles(delta, gradient, gram, gram, gram)
    assert found.bound < F64_IDENTITY
    assert found.estimate == pytest.approx(RIGHT_ANGLE)
    assert found.full_bound == pytest.approx(RIGHT_ANGLE)
    assert found.identity == pytest.approx(math.pi / 4)
