import pytest
import torch
from tests.helpers.interference import EPS32, self_grams
from tests.helpers.spectra import random_deltas, shared_rows
from tests.tolerances import relative_error

from actmat.methods import get_method
from actmat.methods.actmat import ACTMAT

ACTMAT_RIDGE = get_method("actmat_ridge")

merge_actmat = ACTMAT.merge
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


def test_it_is_the_tikhonov_filter_of_actmat():
    deltas = random_deltas(3, 10, 8)
    for solver in ("auto", "eigh"):
        same = merge_actmat(deltas, filter="tikhonov", ridge=0.2, solver=solver).value
        assert relative_error(merge(deltas, ridge=0.2, solver="auto").value, same) < 1e-12


def test_mean_fill_at_a_large_ridge_is_the_average():
    deltas = random_deltas(3, 10, 8)
    assert relative_error(merge(deltas, ridge=1e9, null="mean").value, sum(deltas) / 3) < 1e-6
