"""A certificate is a proof; a factor is that of the shifted matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import symmetric
from tests.tolerances import relative_error

from actmat.linalg.interference.spectral_solve import certified_cholesky, shifted_cholesky


@settings(max_examples=60)
@given(
    exponents=st.lists(st.floats(-9, 0), min_size=1, max_size=8),
    log_rtol=st.floats(-8, -1),
    seed=st.integers(0, 5),
)
def test_a_certificate_is_never_wrong(exponents, log_rtol, seed):
    """A factor says that no eigenvalue is at or below the cut-off, a number that so many are above it."""
    values, rtol = [10.0**e for e in exponents], 10.0**log_rtol
    found = certified_cholesky(symmetric(values, seed), rtol)
    if isinstance(found, int):
        assert 0 <= found <= sum(value > rtol * max(values) for value in values)
    else:
        factor, bound = found
        assert min(values) > rtol * max(values)
        assert bound >= rtol * max(values)
        assert relative_error(factor @ factor.T, symmetric(values, seed)) < 1e-13


def test_certificate_succeeds_where_it_should():
    values = [1.0, 0.5, 0.1, 0.01]
    assert not isinstance(certified_cholesky(symmetric(values), 1e-3), int)
    assert not isinstance(certified_cholesky(symmetric(values).float(), 1e-3), int)


def test_certificate_refuses_a_singular_matrix():
    assert certified_cholesky(symmetric([1.0, 1.0, 0.0]), 0.0) in {0, 1, 2}


@pytest.mark.parametrize(("at", "known"), [(0, 1), (2, 3), (6, 7)])
def test_where_a_factorization_ends_so_many_directions_are_known(at, known):
    matrix = torch.eye(8, dtype=torch.float64)
    assert not isinstance(certified_cholesky(matrix, 1e-3), int)
    matrix[at, at + 1] = matrix[at + 1, at] = 1.0  # eigenvalues 0 and 2, all diagonal entries 1
    assert certified_cholesky(matrix, 1e-3) == known
    matrix[0, 0] = 0.0
    assert certified_cholesky(matrix, 1e-3) == 0


def test_shifted_cholesky_says_when_there_is_no_factor():
    matrix = symmetric([2.0, 1.0])
    assert shifted_cholesky(matrix, -1.5, torch.float64)[1] < len(matrix)
    factor, _ = shifted_cholesky(matrix.float(), 0.5, torch.float64)
    assert factor.dtype == torch.float64
    assert relative_error(factor @ factor.T, matrix + 0.5 * torch.eye(2)) < 1e-6
