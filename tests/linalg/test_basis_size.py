"""The expected size of a basis, against the sizes that the block iteration really takes."""

import math

import pytest
import torch
from torch import Tensor

from actmat.linalg import krylov
from actmat.linalg.krylov import basis_for, quantile

N, BLOCK = 600, 8
EPS32 = torch.finfo(torch.float32).eps
INDEX = torch.arange(1, N + 1, dtype=torch.float64)

SPECTRA = {
    "power 0.4": INDEX.pow(-0.4),
    "power 1": INDEX.pow(-1.0),
    "power 2": INDEX.pow(-2.0),
    "power 1 on a flat rest": INDEX.pow(-1.0) + 0.01 * torch.linspace(1, 0, N, dtype=torch.float64),
    "exponential": torch.exp(-INDEX / 30),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "BLOCK", BLOCK)


def real_size(values: Tensor, count: int, tolerance: float) -> int:
    """Vectors after which the block iteration has the leading pairs, block by block."""
    basis = krylov._Basis(torch.diag(values), N // BLOCK * BLOCK)
    while True:
        basis.grow(basis.size + BLOCK)
        ritz = basis.ritz()
        if basis.size > count and float(ritz.residuals_J[:count].max()) <= tolerance:
            return basis.size


@pytest.mark.parametrize("count", [24, 48, 75])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_the_expected_size_is_near_the_real_one(name: str, count: int) -> None:
    values = SPECTRA[name]
    first = krylov._Basis(torch.diag(values), N // 2)
    first.grow(krylov.FIRST_LOOK * BLOCK)
    ritz = first.ritz()
    tolerance = EPS32 * float(values[count - 1])
    expected = basis_for(ritz.values_J, ritz.counts_J, count, tolerance, BLOCK, N)
    assert 0.75 < real_size(values, count, tolerance) / expected < 1.3


def test_the_spectrum_is_estimated_from_a_first_look() -> None:
    values = SPECTRA["power 1"]
    first = krylov._Basis(torch.diag(values), N // 2)
    first.grow(krylov.FIRST_LOOK * BLOCK)
    ritz = first.ritz()
    assert float(ritz.counts_J.sum()) == pytest.approx(N)
    for rank in (10, 60, 300):
        assert 0.6 < quantile(ritz.values_J, ritz.counts_J, rank) / float(values[rank - 1]) < 1.6


def test_limits_and_empty_cases() -> None:
    values, counts = torch.linspace(1, 0.9, 50, dtype=torch.float64), torch.full((50,), 12.0, dtype=torch.float64)
    assert basis_for(values, counts, 300, EPS32, BLOCK, 0.5 * N) == math.inf
    assert basis_for(values, counts, 30, EPS32, BLOCK, 0.2 * N) == math.inf
    assert basis_for(values, counts, 0, EPS32, BLOCK, N) == 0
    assert basis_for(0 * values, counts, 5, EPS32, BLOCK, N) == 0


def test_the_iteration_in_one_vector_has_the_eigenvalues_of_its_matrix() -> None:
    """All steps together are a change of basis."""
    values = torch.tensor([4.0, 3.0, 1.0, 0.5], dtype=torch.float64)
    t_DD = krylov._lanczos(values, 4)
    assert torch.allclose(torch.linalg.eigvalsh(t_DD[:4, :4]).flip(0), values)
    assert float(t_DD[4, 3]) < EPS32**2
