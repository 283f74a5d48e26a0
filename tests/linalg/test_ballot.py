"""Thresholds, polls and elections, against sorting and against the rule entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import random_deltas

from actmat.linalg.ballot import Poll, StreamedCut, elect_mean, kth_magnitude

entries = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -3e5, 2.0**-140, 0.1]), min_size=1, max_size=20)


def streamed(pieces: list[torch.Tensor], k: int) -> float:
    cut = StreamedCut(lambda total: k)
    while True:
        for piece in pieces:
            cut.observe(piece)
        if not cut.advance():
            assert cut.cut is not None
            return cut.cut


@given(entries, entries, st.integers(-1, 42), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=100, deadline=None)
def test_streamed_and_direct_thresholds_equal_the_sorted_one(first, second, k, dtype):
    pieces = [torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype)]
    whole = torch.cat(pieces)
    if k <= 0:
        expected = math.inf
    elif k >= whole.numel():
        expected = 0.0
    else:
        expected = float(whole.abs().sort(descending=True).values[k - 1])
    assert streamed(pieces, k) == expected
    assert streamed(pieces[::-1], k) == expected
    assert kth_magnitude(whole, k) == expected


def naive_election(parts, cuts):
    out = torch.zeros_like(parts[0])
    for n in range(len(out)):
        kept = [float(p[n]) if abs(float(p[n])) >= c else 0.0 for p, c in zip(parts, cuts, strict=True)]
        votes = [x for x in kept if x * sum(kept) > 0]
        out[n] = sum(votes) / len(votes) if votes else 0.0
    return out


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_election_equals_the_rule_entry_by_entry(seed):
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-2, 3, (12,), generator=g).double() for _ in range(4)]
    cuts = [0.0, 1.0, 2.0, math.inf]
    assert torch.equal(elect_mean(parts, cuts), naive_election(parts, cuts))


def test_cancelled_votes_elect_nothing():
    parts = [torch.tensor([1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.0, 1.0])]
    assert elect_mean(parts, [0.0, 0.0]).tolist() == [0, -2, -3]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_poll_over_tensors_equals_one_over_their_concatenation(order):
    tensors = [random_deltas(2, size, seed=size, dtype=torch.float32) for size in (30, 7, 55)]
    poll = Poll.of(2, lambda total: total // 5)
    rounds = 0
    while True:
        for which in order:
            poll.observe(tensors[which])
        rounds += 1
        if not poll.advance():
            break
    joined = [torch.cat([t[expert] for t in tensors]) for expert in range(2)]
    found = poll.finish()
    assert rounds == 2
    assert found == tuple(kth_magnitude(j, 92 // 5) for j in joined)
