from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interference import gaussian, orthogonal, relative

from actmat.errors import NumericalError
from actmat.linalg import eigen


def symmetric(values: list[float], seed: int = 0) -> torch.Tensor:
    basis = orthogonal(len(values), seed)
    return (basis * torch.tensor(values, dtype=torch.float64)) @ basis.T


def failing(monkeypatch: pytest.MonkeyPatch, name: str, failures: int) -> list[torch.dtype]:
    """The first `failures` calls of a torch.linalg function fail as LAPACK does; returns the dtypes of all calls."""
    real, calls = getattr(torch.linalg, name), []

    def attempt(matrix: torch.Tensor, **options: object) -> object:
        calls.append(matrix.dtype)
        if len(calls) <= failures:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix, **options)

    monkeypatch.setattr(torch.linalg, name, attempt)
    return calls


@pytest.mark.parametrize(
    ("failures", "retries", "dtypes"),
    [
        (0, (), [torch.float32]),
        (1, ("float64",), [torch.float32, torch.float64]),
        (2, ("float64", "jitter"), [torch.float32, torch.float64, torch.float64]),
    ],
)
def test_eigh_retries_are_named_and_keep_the_answer(monkeypatch, failures, retries, dtypes):
    matrix = symmetric([5.0, 2.0, 1.0, 1e-3]).float()
    calls = failing(monkeypatch, "eigh", failures)
    found = eigen.eigh(matrix)
    assert found.retries == retries
    assert calls == dtypes
    assert found.values_N.dtype == found.vectors_NN.dtype == torch.float32
    assert relative((found.vectors_NN * found.values_N) @ found.vectors_NN.T, matrix) < 1e-6


def test_jitter_moves_no_eigenvalue_by_more_than_stated(monkeypatch):
    matrix = symmetric([4.0, 4.0, 1.0, 1e-12])
    failing(monkeypatch, "eigh", 2)
    moved = (eigen.eigh(matrix).values_N - torch.tensor([1e-12, 1, 4, 4], dtype=torch.float64)).abs().max()
    assert moved < 40 * torch.finfo(torch.float64).eps * matrix.abs().max()


def test_three_failures_are_an_error_not_another_method(monkeypatch):
    calls = failing(monkeypatch, "eigh", 99)
    with pytest.raises(NumericalError, match="did not converge"):
        eigen.eigh(symmetric([1.0, 2.0]))
    assert len(calls) == 3


def test_svd_retries_too(monkeypatch):
    matrix = gaussian(1, 5, 8, dtype=torch.float32)[0]
    failing(monkeypatch, "svd", 1)
    found = eigen.thin_svd(matrix)
    assert found.retries == ("float64",)
    assert found.u_MR.shape == (5, 5)
    assert found.vh_RN.shape == (5, 8)
    assert relative((found.u_MR * found.s_R) @ found.vh_RN, matrix) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("decompose", [eigen.eigh, eigen.thin_svd])
def test_values_that_are_not_finite_are_named(decompose, bad):
    matrix = torch.eye(3)
    matrix[1, 1] = bad
    with pytest.raises(NumericalError, match="finite entries"):
        decompose(matrix)


def test_inputs_are_left_alone():
    matrix = symmetric([3.0, 2.0, 1.0])
    before = matrix.clone()
    eigen.eigh(matrix)
    eigen.shifted_cholesky(matrix, 1.0, torch.float64)
    eigen.certified_cholesky(matrix, 1e-3)
    assert torch.equal(matrix, before)


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.floats(-9, 0), min_size=1, max_size=8),
    log_rtol=st.floats(-8, -1),
    seed=st.integers(0, 5),
)
def test_a_certificate_is_never_wrong(exponents, log_rtol, seed):
    """Whatever the spectrum: where a factor is returned, no eigenvalue is at or below the cut-off."""
    values, rtol = [10.0**e for e in exponents], 10.0**log_rtol
    found = eigen.certified_cholesky(symmetric(values, seed), rtol)
    if found is not None:
        factor, bound = found
        assert min(values) > rtol * max(values)
        assert bound >= rtol * max(values)
        assert relative(factor @ factor.T, symmetric(values, seed)) < 1e-13


def test_certificate_succeeds_where_it_should():
    values = [1.0, 0.5, 0.1, 0.01]
    assert eigen.certified_cholesky(symmetric(values), 1e-3) is not None
    assert eigen.certified_cholesky(symmetric(values).float(), 1e-3) is not None


def test_certificate_refuses_a_singular_matrix():
    assert eigen.certified_cholesky(symmetric([1.0, 1.0, 0.0]), 0.0) is None


def test_shifted_cholesky_says_when_there_is_no_factor():
    matrix = symmetric([2.0, 1.0])
    assert eigen.shifted_cholesky(matrix, -1.5, torch.float64) is None
    factor = eigen.shifted_cholesky(matrix.float(), 0.5, torch.float64)
    assert factor.dtype == torch.float64
    assert relative(factor @ factor.T, matrix + 0.5 * torch.eye(2)) < 1e-6
