"""Ranks of known spectra, angles of known subspaces."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import orthonormal
from tests.tolerances import relative_error

from actmat.linalg.spectra import effective_rank, numerical_rank, principal_angles, stable_rank, subspace_overlap

spectra = st.lists(st.floats(0, 1e3), min_size=1, max_size=8)


def test_flat_spectra_have_their_length_as_rank():
    s = torch.tensor([3.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    assert float(effective_rank(s)) == pytest.approx(3)
    assert float(stable_rank(s)) == pytest.approx(3)
    assert int(numerical_rank(s)) == 3


def test_known_values():
    s = torch.tensor([3.0, 1.0], dtype=torch.float64)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(effective_rank(s)) == pytest.approx(math.exp(entropy))
    assert float(stable_rank(s)) == pytest.approx(10 / 9)


@given(spectra)
@settings(max_examples=50, deadline=None)
def test_both_ranks_lie_between_one_and_the_number_of_nonzero_values(values):
    s = torch.tensor(values, dtype=torch.float64)
    nonzero = int((s > 0).sum())
    for rank in (float(effective_rank(s)), float(stable_rank(s))):
        assert min(nonzero, 1) - 1e-9 <= rank <= nonzero + 1e-9


def test_a_zero_matrix_has_rank_zero_also_within_a_batch():
    s = torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    assert effective_rank(s).tolist() == pytest.approx([0, 2])
    assert stable_rank(s).tolist() == pytest.approx([0, 2])
    assert numerical_rank(s).tolist() == [0, 2]


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-7, 0.3, 1.2, math.pi / 2])
def test_angles_are_exact_also_where_the_cosine_is_blind(angle):
    q = orthonormal(9, 4, seed=0)
    turned = math.cos(angle) * q[:, :1] + math.sin(angle) * q[:, 2:3]
    found = principal_angles(q[:, :2] @ torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64), turned)
    assert found.shape == (1,)
    assert abs(float(found) - angle) < 1e-15 + 1e-14 * angle


def test_angles_ascend_and_do_not_depend_on_the_order_of_the_arguments():
    q = orthonormal(12, 6, seed=1)
    angles = torch.tensor([0.1, 0.7, 1.4], dtype=torch.float64)
    a, b = q[:, :3], q[:, :3] * angles.cos() + q[:, 3:] * angles.sin()
    assert relative_error(principal_angles(a, b), angles) < 1e-14
    assert relative_error(principal_angles(b @ orthonormal(3, 3, seed=2), a), angles) < 1e-14
    assert float(subspace_overlap(a, b)) == pytest.approx(float(angles.cos().square().mean()), abs=1e-14)


def test_overlap_is_one_for_nested_and_zero_for_orthogonal_spaces():
    q = orthonormal(10, 5, seed=4)
    assert float(subspace_overlap(q[:, :2], q[:, :4])) == pytest.approx(1)
    assert float(subspace_overlap(q[:, :2], q[:, 2:])) == pytest.approx(0, abs=1e-15)
