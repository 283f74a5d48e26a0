"""ASWUDI: the number of directions, and what happens inside and outside them."""

import math

import pytest
import torch
from tests.helpers.interference import naive, self_grams
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods import get_method

ASWUDI = get_method("aswudi")


merge = ASWUDI.merge


@pytest.mark.parametrize("shape", [(4, 10, 10), (3, 4, 20)])
def test_aswudi_solves_the_leading_directions_alone(shape):
    steep = torch.logspace(0, -1, shape[2], dtype=torch.float64)
    deltas = [d * steep for d in random_deltas(*shape)]
    grams = [g / g.trace() for g in self_grams(deltas)]
    values = torch.linalg.eigvalsh(sum(grams)).clamp_min(0)
    rank = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()))
    floor = torch.sort(values, descending=True).values[rank - 1]
    expected = naive(deltas, grams, response=lambda v: (v >= floor * (1 - 1e-9)).double(), fill=sum(deltas))
    found = merge(deltas)
    assert found.stats["rank"] == rank < shape[2]
    assert relative_error(found.value, expected) < 1e-11


def test_null_zero_keeps_the_base_outside():
    deltas = random_deltas(3, 4, 20)
    found = merge(deltas, null="zero")
    assert int(torch.linalg.matrix_rank(found.value)) <= 4
    outside = torch.linalg.svd(torch.cat(deltas)).Vh[12:]
    assert float((found.value @ outside.T).norm()) < 1e-12
