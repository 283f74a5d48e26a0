"""Joint basis: both routes against the SVD of the concatenation."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.spectra import random_deltas, random_lowrank, with_spectrum
from tests.tolerances import relative_error

from actmat.linalg.singular import joint_basis


@pytest.mark.parametrize("shape", [(10, 14), (14, 10), (40, 6)])
@pytest.mark.parametrize("accuracy", [torch.float32, torch.float64])
def test_basis_and_coordinates_are_those_of_the_concatenation(shape, accuracy):
    deltas = random_deltas(3, *shape)
    basis = joint_basis(deltas, accuracy=accuracy)
    u, s, vh = torch.linalg.svd(torch.cat(deltas, dim=1), full_matrices=False)
    signs = (u * basis.u_OR).sum(0).sign()
    assert relative_error(basis.s_R, s) < 1e-12
    assert relative_error(basis.u_OR * signs, u) < 1e-11
    for delta, slice_RI in zip(deltas, vh.split(shape[1], dim=1), strict=True):
        assert relative_error(basis.whitened(delta) * signs[:, None], slice_RI) < 1e-11
        assert relative_error(basis.coordinates(delta) * signs[:, None], s[:, None] * slice_RI) < 1e-11
        assert relative_error(basis.u_OR @ basis.coordinates(delta), delta) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_joint_range_is_kept(dtype):
    deltas = [d.dense().to(dtype) for d in random_lowrank(3, 20, 15, rank=2)]
    assert joint_basis(deltas).s_R.shape == (6,)


def test_absolute_and_relative_floors_both_drop():
    deltas = [with_spectrum(8, 12, [10.0, 1.0, 1e-4])]
    assert joint_basis(deltas).s_R.shape == (3,)
    assert joint_basis(deltas, atol=1e-3).s_R.shape == (2,)
    assert joint_basis(deltas, rtol=0.5).s_R.shape == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_delta_has_coordinates_that_are_exactly_zero(dtype):
    deltas = [*random_deltas(2, 6, 9, dtype=dtype), torch.zeros(6, 9, dtype=dtype)]
    assert not joint_basis(deltas).coordinates(deltas[2]).any()


def test_lower_ranks_of_a_batch_are_padded_and_marked():
    batch = torch.stack([with_spectrum(5, 7, [2.0, 1.0, 0.5]), with_spectrum(5, 7, [1.0]), torch.zeros(5, 7)])
    basis = joint_basis([batch])
    assert basis.on_R.sum(-1).tolist() == [3, 1, 0]
    assert not basis.whitened(batch)[~basis.on_R].any()
    assert relative_error(basis.u_OR @ basis.coordinates(batch), batch) < 1e-12
