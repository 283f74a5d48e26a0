from typing import Any

import pytest
import torch
from tests.helpers.masking import awkward_deltas, call, naive_elect
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.research.breadcrumbs import BREADCRUMBS


def naive_band(delta: Tensor, density: float, gamma: float) -> Tensor:
    """Sort, leave out `int(gamma N)` at the top, keep the next `int(density N)`."""
    flat = delta.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))
    kept = int(density * len(flat))
    top = min(int(gamma * len(flat)), len(flat) - kept)
    chosen = set(order[top : top + kept])
    values = [x if i in chosen else 0.0 for i, x in enumerate(flat)]
    return torch.tensor(values, dtype=delta.dtype).view(delta.shape)


@pytest.mark.parametrize("make", [awkward_deltas, random_deltas])
@pytest.mark.parametrize(
    ("density", "gamma"), [(0.9, 0.01), (0.7, 0.1), (0.5, 0.5), (0.8, 0.4), (1.0, 0.3), (0.0, 0.2), (0.3, 0.0)]
)
@pytest.mark.parametrize(("sign_election", "reduce"), [(False, "sum"), (True, "sum"), (True, "mean")])
def test_naive_transcription(make: Any, density: float, gamma: float, sign_election: bool, reduce: str) -> None:
    deltas, weights = make(3, 12, 7), [0.5, 1.0, 0.25]
    votes = [w * naive_band(d, density, gamma) for w, d in zip(weights, deltas, strict=True)]
    expected = naive_elect(votes, weights, reduce=reduce, zero_sign="positive") if sign_election else sum(votes)
    options = {"density": density, "gamma": gamma, "sign_election": sign_election, "reduce": reduce}
    assert relative_error(call(BREADCRUMBS, deltas, weights=weights, **options), 0.3 * expected) < 1e-14


def test_one_fraction_per_expert() -> None:
    deltas = random_deltas(2, 50)
    expected = naive_band(deltas[0], 0.5, 0.1) + naive_band(deltas[1], 0.8, 0.2)
    found = call(BREADCRUMBS, deltas, density=[0.5, 0.8], gamma=[0.1, 0.2], scaling=1.0)
    assert relative_error(found, expected) < 1e-14
    with pytest.raises(RecipeError, match="'gamma' is a list of 3"):
        call(BREADCRUMBS, deltas, gamma=[0.1, 0.1, 0.1])


def test_rescaled_deltas_have_their_l1_norm_back() -> None:
    (delta,) = random_deltas(1, 12, 10)
    plain = BREADCRUMBS.merge([delta], density=0.5, gamma=0.1, scaling=1.0).value
    found = BREADCRUMBS.merge([delta], density=0.5, gamma=0.1, scaling=1.0, rescale="l1").value
    assert torch.equal(found != 0, plain != 0)
    assert float(found.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-12)
