"""Polar factor: against U V^T in float64, with its defining properties, over and below full rank."""

import pytest
import torch
from tests.helpers.spectra import graded, with_spectrum
from tests.tolerances import relative_error

from actmat.linalg.singular import polar_factor

SHAPES = [(12, 12), (8, 30), (30, 8), (20, 14)]


def naive(matrix: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accuracy", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [3.0, 1e3, 1e6])
def test_equals_u_vt_on_any_condition(shape, accuracy, condition):
    matrix = graded(*shape, condition)
    found = polar_factor(matrix, accuracy=accuracy)
    bound = 2.0**-50 * condition**2 if accuracy == torch.float32 else 2.0**-50 * condition
    assert relative_error(found.factor_MN, naive(matrix)) < max(bound, 1e-14)
    assert relative_error(found.s_S, torch.linalg.svdvals(matrix)) < 1e-9
    assert int(found.rank) == min(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rank_deficient_gives_the_partial_isometry_of_the_range(dtype, shape):
    s = [2.0, 1.0, 0.1]
    matrix = with_spectrum(*shape, s, seed=5)
    expected = with_spectrum(*shape, [1.0] * 3, seed=5)
    found = polar_factor(matrix.to(dtype))
    assert int(found.rank) == 3
    assert relative_error(found.factor_MN, expected) < (1e-5 if dtype == torch.float32 else 1e-13)
    assert not found.s_S[3:].any()


def test_complete_is_an_isometry_that_contains_the_range():
    matrix = with_spectrum(6, 9, [2.0, 1.0])
    full, part = polar_factor(matrix, complete=True), polar_factor(matrix)
    assert relative_error(full.factor_MN @ full.factor_MN.mT, torch.eye(6)) < 1e-14
    assert int(full.rank) == int(part.rank) == 2
    assert relative_error(part.factor_MN @ part.factor_MN.mT @ full.factor_MN, part.factor_MN) < 1e-13
