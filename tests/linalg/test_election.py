"""Sign election and sums over pieces equal their entry-by-entry forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.masking import awkward_deltas, naive_elect, naive_top
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.linalg import places, threshold
from actmat.linalg.election import elect, masked_sum, sign_balance
from actmat.linalg.masks import Drop, Keep, top_trims


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "PIECE", 12)
    monkeypatch.setattr(places, "PLACE", 12)


@pytest.mark.parametrize("n_experts", [1, 2, 5])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("zero_sign", ["majority", "positive", "zero"])
@pytest.mark.parametrize("weighted", [False, True])
def test_election_equals_its_definition(n_experts: int, reduce: Any, zero_sign: Any, weighted: bool) -> None:
    for seed in range(4):
        deltas = awkward_deltas(n_experts, 7, 9, seed)
        weights = [0.5, 0.25, 1.0, 2.0, 0.5][:n_experts] if weighted else [1.0] * n_experts
        trims = [top_trims(d.reshape(-1), [20], exact=True)[0][0] for d in deltas]
        votes = [w * naive_top(d, 20, exact=True) for w, d in zip(weights, deltas, strict=True)]
        found = elect(deltas, trims, scales=weights, counts=weights, reduce=reduce, zero_sign=zero_sign)
        assert relative_error(found, naive_elect(votes, weights, reduce=reduce, zero_sign=zero_sign)) < 1e-15


def test_cancelled_votes_follow_the_majority_in_both_directions() -> None:
    for sign in (1.0, -1.0):
        deltas = [sign * torch.tensor([1.0, 3.0, 2.0]), sign * torch.tensor([-1.0, 3.0, 2.0])]
        found = elect(deltas, [Keep()] * 2, scales=[1, 1], counts=[1, 1])
        assert found.tolist() == [sign * 1.0, sign * 3.0, sign * 2.0]


def test_a_draw_elects_nothing() -> None:
    deltas = [torch.tensor([1.0, 2.0, -2.0]), torch.tensor([-1.0, 2.0, -2.0])]
    assert elect(deltas, [Keep()] * 2, scales=[1, 1], counts=[1, 1]).tolist() == [0.0, 2.0, -2.0]


@pytest.mark.parametrize("majority", [-1, 0, 1])
def test_a_given_majority_overrules_the_tensors_own(majority: int) -> None:
    deltas = awkward_deltas(3, 50)
    found = elect(deltas, [Keep()] * 3, scales=[1] * 3, counts=[1] * 3, majority=majority)
    expected = naive_elect(deltas, [1] * 3, reduce="mean", zero_sign="majority", majority=majority)
    assert relative_error(found, expected) < 1e-15


def test_tiny_entries_do_not_underflow() -> None:
    """Agreement is decided by signs, never by a product of two entries."""
    deltas = [torch.tensor([1e-30, -1e-40]), torch.tensor([3e-30, -1e-40])]
    found = elect(deltas, [Keep()] * 2, scales=[1, 1], counts=[1, 1])
    assert torch.allclose(found, torch.tensor([2e-30, -1e-40]), rtol=1e-6, atol=0)


def test_mix_weighs_the_agreeing_entries_but_not_the_votes() -> None:
    deltas = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, -1.0])]
    found = elect(deltas, [Keep()] * 2, scales=[1, 1], counts=[0.25, 0.75], mix=[0.25, 0.75])
    assert found.tolist() == [2.5, 5.0]


def test_a_negative_weight_votes_against() -> None:
    deltas = [torch.tensor([1.0]), torch.tensor([4.0])]
    found = elect(deltas, [Keep()] * 2, scales=[1.0, -0.5], counts=[1.0, -0.5])
    assert found.tolist() == [4.0], "votes 1 and -2: the second wins, -2 / -0.5"


def test_sign_balance_counts_elected_signs() -> None:
    deltas = awkward_deltas(3, 37)
    expected = int(torch.stack(deltas).sum(0).sign().sum())
    assert sign_balance(deltas, [Keep()] * 3) == expected


@pytest.mark.parametrize("n_experts", [1, 3])
def test_weighted_sum_equals_its_definition(n_experts: int) -> None:
    deltas = random_deltas(n_experts, 5, 9)
    trims = [top_trims(d.reshape(-1), [13], exact=True)[0][0] for d in deltas]
    scales = [0.5, -2.0, 3.0][:n_experts]
    expected = sum(s * naive_top(d, 13, exact=True) for s, d in zip(scales, deltas, strict=True))
    assert relative_error(masked_sum(deltas, trims, scales), expected) < 1e-15


def test_pieces_of_random_masks_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = random_deltas(2, 333)
    in_pieces = masked_sum(deltas, [Drop(0.5, 1), Drop(0.5, 2)], [1, 1])
    monkeypatch.setattr(places, "PLACE", 1000)
    assert torch.equal(masked_sum(deltas, [Drop(0.5, 1), Drop(0.5, 2)], [1, 1]), in_pieces)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    deltas = [torch.ones(shape), torch.ones(shape)]
    assert torch.equal(elect(deltas, [Keep()] * 2, scales=[1, 1], counts=[1, 1]), torch.ones(shape))
    assert torch.equal(masked_sum(deltas, [Keep()] * 2, [1, 2]), torch.full(shape, 3.0))
