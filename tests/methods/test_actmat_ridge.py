import pytest
import torch
from tests.helpers.interference import EPS32, naive, self_grams
from tests.helpers.spectra import random_deltas, shared_rows
from tests.tolerances import relative_error

from actmat.methods import get_method

ACTMAT_RIDGE = get_method("actmat_ridge")

merge = ACTMAT_RIDGE.merge


@pytest.mark.parametrize("ridge", [0.1, 1e-3, 1e-5])
def test_float32_on_a_steep_spectrum(ridge):
    """The ridge bounds the condition number, so float32 is accurate whatever the spectrum."""
    deltas = shared_rows(4, 24, 1e-5)
    grams = self_grams(deltas)
    level = ridge * float(sum(grams).trace()) / 24
    expected = naive(deltas, grams, response=lambda values: values / (values + level))
    found = merge([d.float() for d in deltas], ridge=ridge)
    largest = float(torch.linalg.eigvalsh(sum(grams))[-1])
    assert relative_error(found.value, expected) < 2 * EPS32 * largest / found.stats["ridge"]


def test_no_eigendecomposition(monkeypatch):
    def forbidden(*_: object) -> None:
        raise AssertionError("the ridge needs no eigendecomposition")

    monkeypatch.setattr(torch.linalg, "eigh", forbidden)
    stats = merge(random_deltas(3, 10, 10)).stats
    assert stats["solver"] == "primal/cholesky"
    assert stats["ridge"] > 0
