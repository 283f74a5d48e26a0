"""Every retry is named, and changes no more than it says."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.lapack import failing
from tests.helpers.spectra import orthogonal, random_deltas
from tests.tolerances import relative_error

from actmat.errors import NumericalError
from actmat.linalg.lapack import economy_svd, eigh, only_singular_values, retry_stats


def symmetric(values: list[float], seed: int = 0) -> torch.Tensor:
    basis = orthogonal(len(values), seed)
    return (basis * torch.tensor(values, dtype=torch.float64)) @ basis.T


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
    found = eigh(matrix)
    assert found.retries == retries
    assert calls == dtypes
    assert found.values_N.dtype == found.vectors_NN.dtype == torch.float32
    assert relative_error((found.vectors_NN * found.values_N) @ found.vectors_NN.T, matrix) < 1e-6


def test_jitter_moves_no_eigenvalue_by_more_than_stated(monkeypatch):
    matrix = symmetric([4.0, 4.0, 1.0, 1e-12])
    failing(monkeypatch, "eigh", 1)
    moved = (eigh(matrix).values_N - torch.tensor([1e-12, 1, 4, 4], dtype=torch.float64)).abs().max()
    assert moved < 40 * torch.finfo(torch.float64).eps * matrix.abs().max()


@pytest.mark.parametrize(("dtype", "attempts"), [(torch.float32, 3), (torch.float64, 2)])
def test_failures_are_an_error_not_another_method(monkeypatch, dtype, attempts):
    calls = failing(monkeypatch, "eigh", 99)
    with pytest.raises(NumericalError, match="did not converge"):
        eigh(symmetric([1.0, 2.0]).to(dtype))
    assert len(calls) == attempts  # float64 does not try the same again


def test_nan_from_a_finite_matrix_is_a_failure_too(monkeypatch):
    real, calls = torch.linalg.eigh, []

    def silent(matrix):
        calls.append(matrix)
        values, vectors = real(matrix)
        return (values * float("nan"), vectors) if len(calls) == 1 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", silent)
    found = eigh(symmetric([3.0, 1.0]))
    assert found.retries == ("jitter",)
    assert found.values_N.tolist() == pytest.approx([1.0, 3.0])


def test_batches_are_jittered_by_their_own_size(monkeypatch):
    batch = torch.stack([symmetric([3.0, 1.0]), 1e-9 * symmetric([3.0, 1.0])])
    failing(monkeypatch, "eigh", 1)
    values = eigh(batch).values_N
    assert relative_error(values[1], torch.tensor([1e-9, 3e-9], dtype=torch.float64)) < 1e-14
    failing(monkeypatch, "svdvals", 1)
    s, retries = only_singular_values(batch)
    assert retries == ("jitter",)
    assert relative_error(s[1], torch.tensor([3e-9, 1e-9], dtype=torch.float64)) < 1e-14


def test_a_record_names_each_kind_once_or_says_nothing():
    assert retry_stats(("float64", "jitter", "float64")) == {"retries": "float64, jitter"}
    assert retry_stats(()) == {}


def test_svd_retries_too(monkeypatch):
    matrix = random_deltas(1, 5, 8, dtype=torch.float32)[0]
    failing(monkeypatch, "svd", 1)
    found = economy_svd(matrix)
    assert found.retries == ("float64",)
    assert found.u_MR.shape == (5, 5)
    assert found.vh_RN.shape == (5, 8)
    assert relative_error((found.u_MR * found.s_R) @ found.vh_RN, matrix) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("decompose", [eigh, economy_svd])
def test_values_that_are_not_finite_are_named(decompose, bad):
    matrix = torch.eye(3)
    matrix[1, 1] = bad
    with pytest.raises(NumericalError, match="NaN or infinity"):
        decompose(matrix)


def test_inputs_are_left_alone():
    matrix = symmetric([3.0, 2.0, 1.0])
    before = matrix.clone()
    eigh(matrix)
    economy_svd(matrix)
    assert torch.equal(matrix, before)
