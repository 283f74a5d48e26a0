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


def test_a_spike_is_solved_for_and_the_sum_stays_elsewhere():
    deltas = [d * torch.tensor([1000.0, 1, 1, 1, 1], dtype=torch.float64) for d in random_deltas(3, 6, 5)]
    grams = [g / g.trace() for g in self_grams(deltas)]
    values, vectors = torch.linalg.eigh(sum(grams))
    spike, rest = vectors[:, -1:], vectors[:, :-1]
    found = merge(deltas, rtol=0.5)
    assert found.stats["rank"] == 1
    left = sum(d @ g for d, g in zip(deltas, grams, strict=True))
    assert relative_error(found.value @ spike, left @ spike / values[-1]) < 1e-12
    assert relative_error(found.value @ rest, sum(deltas) @ rest) < 1e-9
    assert merge(deltas).stats["rank"] == 2  # the participation number is a little above 1
