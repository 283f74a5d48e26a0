import pytest
import torch
from tests.helpers.interference import EPS32, self_grams
from tests.helpers.spectra import random_deltas, shared_rows
from tests.tolerances import relative_error

from actmat.methods import get_method

ACTMAT_RIDGE = get_method("actmat_ridge")

merge = ACTMAT_RIDGE.merge


def transcription(deltas, ridge):
    grams = self_grams(deltas)
    width = deltas[0].shape[1]
    shifted = sum(grams) + ridge * float(torch.trace(sum(grams))) / width * torch.eye(width, dtype=torch.float64)
    return sum(d @ g for d, g in zip(deltas, grams, strict=True)) @ torch.linalg.inv(shifted)


@pytest.mark.parametrize("ridge", [0.1, 1e-3, 1e-5])
def test_float32_on_a_steep_spectrum(ridge):
    """The ridge bounds the condition number, so float32 is accurate whatever the spectrum."""
    deltas = shared_rows(4, 24, 1e-5)
    found = merge([d.float() for d in deltas], ridge=ridge)
    largest = float(torch.linalg.eigvalsh(sum(self_grams(deltas)))[-1])
    assert relative_error(found.value, transcription(deltas, ridge)) < 2 * EPS32 * largest / found.stats["ridge"]


def test_no_eigendecomposition(monkeypatch):
    def forbidden(*_: object) -> None:
        raise AssertionError("the ridge needs no eigendecomposition")

    monkeypatch.setattr(torch.linalg, "eigh", forbidden)
    stats = merge(random_deltas(3, 10, 10)).stats
    assert stats["solver"] == "primal/cholesky"
    assert stats["ridge"] > 0
