from __future__ import annotations

import pytest
import torch
from tests.helpers.interference import naive
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods import get_method

CENTRED = get_method("centred")


merge = CENTRED.merge


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 20, 8), (2, 4, 20)])
def test_centring(shape):
    deltas = random_deltas(*shape)
    scatter = [torch.cov(d.T, correction=0) * shape[1] for d in deltas]
    assert relative_error(merge(deltas).value, naive(deltas, scatter)) < 1e-10


def test_does_not_see_a_row_common_to_all_outputs_in_its_estimate():
    """Adding one row to every row of a delta leaves its covariance, and so the solve's matrix, as it was."""
    deltas, common = random_deltas(3, 12, 6), random_deltas(1, 1, 6, seed=3)[0]
    shifted = [deltas[0] + common, *deltas[1:]]
    scatter = [torch.cov(d.T, correction=0) * 12 for d in deltas]
    assert relative_error(merge(shifted).value, naive(shifted, scatter)) < 1e-11
