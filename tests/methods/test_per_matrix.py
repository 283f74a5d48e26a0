"""Rules for one matrix over batches: shapes, records, retries."""

import pytest
import torch
from tests.helpers.spectra import random_deltas

from actmat.methods._shared.per_matrix import OneMatrix, each_matrix


def rule(deltas):
    total = sum(deltas)
    size = float(total.norm())
    return OneMatrix(total, {"size_max": size, "size_min": size, "count": 1}, ("jitter",) if size > 5 else ())


def test_one_matrix_is_given_as_it_is():
    deltas = random_deltas(2, 3, 4)
    value, stats = each_matrix(rule, deltas)
    assert torch.equal(value, deltas[0] + deltas[1])
    assert stats["size_max"] == stats["size_min"]
    assert stats["count"] == 1


@pytest.mark.parametrize("batch", [(5,), (2, 3)])
def test_batches_keep_their_axes_and_share_a_record(batch):
    deltas = random_deltas(2, *batch, 3, 4)
    value, stats = each_matrix(rule, deltas)
    assert torch.equal(value, deltas[0] + deltas[1])
    norms = torch.linalg.matrix_norm(value)
    assert stats["count"] == norms.numel()
    assert stats["size_max"] == pytest.approx(float(norms.max()))
    assert stats["size_min"] == pytest.approx(float(norms.min()))
    assert ("retries" in stats) == bool((norms > 5).any())


def test_an_empty_batch_has_no_record():
    value, stats = each_matrix(rule, [torch.zeros(0, 3, 4)] * 2)
    assert value.shape == (0, 3, 4)
    assert stats == {}
