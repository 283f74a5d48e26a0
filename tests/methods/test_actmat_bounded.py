"""The preset of the study: ACTMat's direction, the average's size."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.interference import self_grams
from tests.helpers.spectra import random_deltas
from tests.tolerances import F64_IDENTITY, relative_error

from actmat.linalg.caps import cap_delta
from actmat.linalg.interference.rule import Rule
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.methods.actmat import ACTMAT

ACTMAT_BOUNDED = get_method("actmat_bounded")

merge_actmat = ACTMAT.merge
merge = ACTMAT_BOUNDED.merge
merge_lowrank = ACTMAT_BOUNDED.lowrank.merge


def transcription(deltas, ridge, weights=None):
    weights = [1.0] * len(deltas) if weights is None else weights
    grams = [w * g for w, g in zip(weights, self_grams(deltas), strict=True)]
    average = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    width = deltas[0].shape[1]
    total = sum(grams)
    shifted = total + ridge * float(total.trace()) / width * torch.eye(width, dtype=torch.float64)
    target = sum(d @ g for d, g in zip(deltas, grams, strict=True))
    found = average + (target - average @ total) @ torch.linalg.inv(shifted)
    return found * min(1.0, float(average.norm() / found.norm()))


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 30, 8), (3, 4, 20), (2, 12, 20)])
@pytest.mark.parametrize(("ridge", "weights"), [(1.0, None), (0.1, [1.0, 2.0, 0.5, 3.0]), (20.0, None)])
def test_equation(shape, ridge, weights):
    deltas = random_deltas(*shape)
    weights = weights and weights[: len(deltas)]
    found = merge(deltas, ridge=ridge, weights=weights)
    assert relative_error(found.value, transcription(deltas, ridge, weights)) < 1e-12


def test_it_is_never_longer_than_the_average_and_says_so():
    deltas = random_deltas(5, 12, 16)
    average = sum(deltas) / 5
    found = merge(deltas)
    assert found.stats["norm_bound"] == pytest.approx(float(average.norm()))
    assert found.stats["norm_before_bound"] > found.stats["norm_bound"], "the bound is met here"
    assert found.stats["norm"] == pytest.approx(float(average.norm()), rel=1e-12)


def test_what_is_shorter_than_the_average_is_left_alone():
    """Two experts against a longer one: its cube nearly cancels theirs, where the average keeps a quarter."""
    deltas = [torch.tensor([[x]], dtype=torch.float64) for x in (1.0, 1.0, -1.2)]
    plain = merge_actmat(deltas, filter="tikhonov", ridge=1.0, null="mean").value
    assert 0 < plain.norm() < abs(sum(deltas)) / 3
    assert torch.equal(merge(deltas).value, plain)


def test_one_expert_is_returned():
    (delta,) = random_deltas(1, 5, 7)
    assert relative_error(merge([delta]).value, delta) < F64_IDENTITY


def test_it_is_the_ridge_filled_with_the_average_and_capped():
    deltas = random_deltas(3, 10, 8)
    plain = merge_actmat(deltas, filter="tikhonov", ridge=1.0, null="mean").value
    capped, _ = cap_delta(plain, deltas, norm_cap="average")
    assert relative_error(merge(deltas).value, capped) < 1e-12


def test_each_matrix_of_a_stack_has_its_own_bound():
    pair = random_deltas(3, 6, 8), random_deltas(3, 6, 8, seed=9)
    deltas = [torch.stack([d, 100 * e]) for d, e in zip(*pair, strict=True)]
    found = merge(deltas).value
    for item in range(2):
        assert relative_error(found[item], merge([d[item] for d in deltas]).value) < 1e-12


def test_a_large_ridge_is_the_average():
    deltas = random_deltas(3, 10, 8)
    assert relative_error(merge(deltas, ridge=1e9).value, sum(deltas) / 3) < 1e-6


def test_factors_that_meet_the_bound():
    factors = [LowRank(*random_deltas(1, 20, r, seed=r), *random_deltas(1, r, 24, seed=r + 9)) for r in (2, 3, 4)]
    dense = [f.dense() for f in factors]
    found = merge_lowrank(factors)
    assert found.stats["norm_before_bound"] > found.stats["norm_bound"]
    assert relative_error(found.value.dense(), transcription(dense, 1.0)) < 1e-11


def test_weights_of_nothing_are_refused():
    with pytest.raises(ValueError, match="sum of the weights, which is zero"):
        merge(random_deltas(2, 4, 4), weights=[0.0, 0.0])


def test_a_bound_without_a_fill_is_refused():
    with pytest.raises(ValueError, match="needs a fill"):
        Rule(bounded=True)
