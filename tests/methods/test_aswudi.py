"""ASWUDI: the number of directions, and what happens inside and outside them."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers.interference import gaussian, naive, relative, self_grams

from actmat.methods.aswudi import merge


@pytest.mark.parametrize("shape", [(4, 10, 10), (3, 4, 20)])
def test_aswudi_solves_the_leading_directions_alone(shape):
    steep = torch.logspace(0, -1, shape[2], dtype=torch.float64)
    deltas = [d * steep for d in gaussian(*shape)]
    grams = [g / g.trace() for g in self_grams(deltas)]
    values = torch.linalg.eigvalsh(sum(grams)).clamp_min(0)
    rank = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()))
    floor = torch.sort(values, descending=True).values[rank - 1]
    expected = naive(deltas, grams, response=lambda v: (v >= floor * (1 - 1e-9)).double(), fill=sum(deltas))
    found = merge(deltas)
    assert found.stats["rank"] == rank < shape[2]
    assert relative(found.value, expected) < 1e-11


def test_null_zero_keeps_the_base_outside():
    deltas = gaussian(3, 4, 20)
    found = merge(deltas, null="zero")
    assert int(torch.linalg.matrix_rank(found.value)) <= 4
    outside = torch.linalg.svd(torch.cat(deltas)).Vh[12:]
    assert float((found.value @ outside.T).norm()) < 1e-12


def test_a_spike_leaves_the_rest_to_the_sum():
    """One direction carries nearly all energy: solved for alone, it leaves the sum elsewhere."""
    deltas = gaussian(3, 6, 5)
    spike = [d * torch.tensor([100.0, 1, 1, 1, 1], dtype=torch.float64) for d in deltas]
    found = merge(spike)
    assert found.stats["rank"] == 2
    plain = merge(spike, rtol=0.5)
    assert plain.stats["rank"] == 1
    assert relative(plain.value[:, 1:], sum(spike)[:, 1:]) < 0.1
