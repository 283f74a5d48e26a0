"""Sign election and sums over chunks equal their entry-by-entry forms."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.masking import awkward_deltas, naive_elect, naive_top
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.extras.research.drop import Drop
from actmat.linalg import chunks
from actmat.linalg.masks.election import elect, masked_sum, sign_balance
from actmat.linalg.masks.mask import KEEP_ALL, top_trims


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ENTRIES", 12)


@pytest.mark.parametrize("n_experts", [1, 2, 5])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("zero_sign", ["majority", "positive", "zero"])
@pytest.mark.parametrize("weighted", [False, True])
def test_election_equals_its_definition(n_experts: int, reduce: Any, zero_sign: Any, weighted: bool) -> None:
    for seed in range(4):
        deltas = awkward_deltas(n_experts, 7, 9, seed)
        weights = [0.5, 0.25, 1.0, 2.0, 0.5][:n_experts] if weighted else [1.0] * n_experts
        trims = [trim for ((trim, _),) in top_trims(deltas, [[20]] * len(deltas), exact=True)]
        votes = [w * naive_top(d, 20, exact=True) for w, d in zip(weights, deltas, strict=True)]
        found = elect(deltas, trims, scales=weights, counts=weights, reduce=reduce, zero_sign=zero_sign)
        assert relative_error(found, naive_elect(votes, weights, reduce=reduce, zero_sign=zero_sign)) < 1e-15


def test_canceled_votes_follow_the_majority_in_both_directions() -> None:
    for sign in (1.0, -1.0):
        deltas = [sign * torch.tensor([1.0, 3.0, 2.0]), sign * torch.tensor([-1.0, 3.0, 2.0])]
        found = elect(deltas, [KEEP_ALL] * 2, scales=[1, 1], counts=[1, 1])
        assert found.tolist() == [sign * 1.0, sign * 3.0, sign * 2.0]


def test_a_draw_elects_nothing() -> None:
    deltas = [torch.tensor([1.0, 2.0, -2.0]), torch.tensor([-1.0, 2.0, -2.0])]
    assert elect(deltas, [KEEP_ALL] * 2, scales=[1, 1], counts=[1, 1]).tolist() == [0.0, 2.0, -2.0]


@pytest.mark.parametrize("majority", [-1, 0, 1])
def test_a_given_majority_overrules_the_tensors_own(majority: int) -> None:
    deltas = awkward_deltas(3, 50)
    found = elect(deltas, [KEEP_ALL] * 3, scales=[1] * 3, counts=[1] * 3, majority=majority)
    expected = naive_elect(deltas, [1] * 3, reduce="mean", zero_sign="majority", majority=majority)
    assert relative_error(found, expected) < 1e-15


def test_tiny_entries_do_not_underflow() -> None:
    """Agreement is decided by signs, never by a product of two entries."""
    deltas = [torch.tensor([1e-30, -1e-40]), torch.tensor([3e-30, -1e-40])]
    found = elect(deltas, [KEEP_ALL] * 2, scales=[1, 1], counts=[1, 1])
    assert torch.allclose(found, torch.tensor([2e-30, -1e-40]), rtol=1e-6, atol=0)


def test_mix_weighs_the_agreeing_entries_but_not_the_votes() -> None:
    deltas = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, -1.0])]
    found = elect(deltas, [KEEP_ALL] * 2, scales=[1, 1], counts=[0.25, 0.75], mix=[0.25, 0.75])
    assert found.tolist() == [2.5, 5.0]


def test_a_negative_weight_votes_against() -> None:
    deltas = [torch.tensor([1.0]), torch.tensor([4.0])]
    found = elect(deltas, [KEEP_ALL] * 2, scales=[1.0, -0.5], counts=[1.0, -0.5])
    assert found.tolist() == [4.0], "votes 1 and -2: the second wins, -2 / -0.5"


def test_sign_balance_counts_elected_signs() -> None:
    deltas = awkward_deltas(3, 37)
    expected = int(torch.stack(deltas).sum(0).sign().sum())
    assert sign_balance(deltas, [KEEP_ALL] * 3) == expected


@pytest.mark.parametrize("n_experts", [1, 3])
def test_weighted_sum_equals_its_definition(n_experts: int) -> None:
    deltas = random_deltas(n_experts, 5, 9)
    trims = [trim for ((trim, _),) in top_trims(deltas, [[13]] * len(deltas), exact=True)]
    scales = [0.5, -2.0, 3.0][:n_experts]
    expected = sum(s * naive_top(d, 13, exact=True) for s, d in zip(scales, deltas, strict=True))
    assert relative_error(masked_sum(deltas, trims, scales), expected) < 1e-15


def test_chunks_of_random_masks_continue_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = random_deltas(2, 333)
    in_chunks = masked_sum(deltas, [Drop(0.5, 1), Drop(0.5, 2)], [1, 1])
    monkeypatch.setattr(chunks, "CHUNK_ENTRIES", 1000)
    assert torch.equal(masked_sum(deltas, [Drop(0.5, 1), Drop(0.5, 2)], [1, 1]), in_chunks)


def naive_float32(votes: list[torch.Tensor], counts: list[float], tie_break: int) -> torch.Tensor:
    """The election in float32, one operation after the other as its definition says, with nothing left out."""
    total = torch.zeros_like(votes[0])
    for vote in votes:
        total = total + vote
    elected = torch.sign(torch.sign(total) + 0.5 * tie_break)
    kept = [torch.where(torch.sign(v) == elected, v, torch.zeros_like(v)) * elected.abs() for v in votes]
    top, divisor = torch.zeros_like(total), torch.zeros_like(total)
    for vote, count in zip(kept, counts, strict=True):
        top = top + vote
        divisor = divisor + count * torch.sign(vote).abs()
    return top / torch.where(divisor == 0, torch.ones_like(divisor), divisor) + 0.0


@settings(max_examples=60)
@given(seed=st.integers(0, 2**16), n_experts=st.integers(1, 5), exact=st.booleans(), zero=st.booleans())
def test_election_is_the_definition_in_float32_to_the_last_bit(
    seed: int, n_experts: int, exact: bool, zero: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (n_experts, 45)
    draws = torch.randint(-3, 4, shape, generator=generator) / 8 if exact else torch.randn(shape, generator=generator)
    deltas = list(draws * (torch.rand(shape, generator=generator) < 0.6))  # products with 0 leave -0 behind
    counts = [0.5, 0.25, 1.0, 2.0, 0.75][:n_experts]
    found = elect(deltas, [KEEP_ALL] * n_experts, scales=[1.0] * n_experts, counts=counts,
                  zero_sign="zero" if zero else "positive")  # fmt: skip
    expected = naive_float32(deltas, counts, 0 if zero else 1)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), "the sign of zeros too"
