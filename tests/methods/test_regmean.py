import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.methods.regmean import REGMEAN

merge = REGMEAN.merge


def inputs(n_experts, samples, width):
    return random_deltas(n_experts, samples, width, seed=31)


def given(samples):
    return {"gram": [x.T @ x for x in samples]}


def test_it_is_least_squares_on_the_outputs():
    """Stack inputs and targets of all experts and let a least-squares routine solve it."""
    samples, deltas = inputs(3, 20, 6), random_deltas(3, 9, 6)
    targets = torch.cat([x @ d.T for x, d in zip(samples, deltas, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(samples), targets).solution.T
    assert relative_error(merge(deltas, statistics=given(samples)).value, expected) < 1e-12


def test_fewer_samples_than_inputs_keep_the_base_elsewhere():
    samples, deltas = inputs(2, 3, 10), random_deltas(2, 9, 10)
    merged = merge(deltas, statistics=given(samples))
    assert merged.stats["rank"] == 6
    outside = torch.linalg.svd(torch.cat(samples)).Vh[6:]
    assert float((merged.value @ outside.T).norm()) < 1e-11


@pytest.mark.parametrize("tiny", [1.0, 1e-30])
def test_a_prior_adds_the_deltas_own_gram_of_equal_trace(tiny):
    """Of no samples at all the prior would be ACTMat with normalized Grams; a delta of zeros has none."""
    grams, deltas = given(inputs(3, 2, 6))["gram"], [tiny * d for d in random_deltas(3, 9, 6)]
    deltas[2] = torch.zeros_like(deltas[2])
    more = [g + 4 * g.trace() * (d.T @ d) / d.square().sum() for g, d in zip(grams[:2], deltas, strict=False)]
    expected = merge(deltas, statistics={"gram": [*more, grams[2]]}).value
    found = merge(deltas, statistics={"gram": grams}, prior=4.0)
    assert relative_error(found.value, expected) < 1e-12
    pairs = [LowRank(d, torch.eye(6, dtype=d.dtype)) for d in deltas]
    low = get_method("regmean").lowrank.merge(pairs, statistics={"gram": grams}, prior=4.0)
    assert relative_error(low.value.dense(), expected) < 1e-10


@pytest.mark.parametrize("samples", [2, 20])
def test_a_ridge_fades_out_weak_directions_in_place_of_the_cut_off(samples):
    """In both forms; the ridge is in units of the mean eigenvalue of the summed Gram."""
    grams, deltas = given(inputs(3, samples, 6))["gram"], random_deltas(3, 9, 6)
    summed = sum(grams)
    ridge = 0.01 * summed.trace() / 6 * torch.eye(6, dtype=summed.dtype)
    expected = sum(d @ g for d, g in zip(deltas, grams, strict=True)) @ torch.linalg.inv(summed + ridge)
    assert relative_error(merge(deltas, statistics={"gram": grams}, ridge=0.01).value, expected) < 1e-12
    pairs = [LowRank(d, torch.eye(6, dtype=d.dtype)) for d in deltas]
    low = get_method("regmean").lowrank.merge(pairs, statistics={"gram": grams}, ridge=0.01)
    assert relative_error(low.value.dense(), expected) < 1e-10


def test_normalize_trace_makes_the_number_of_tokens_irrelevant():
    grams, deltas = given(inputs(3, 20, 6))["gram"], random_deltas(3, 9, 6)
    more = [50 * grams[0], *grams[1:]]
    plain, other = (merge(deltas, statistics={"gram": g}, normalize="trace").value for g in (grams, more))
    assert relative_error(other, plain) < 1e-12
    assert (
        relative_error(merge(deltas, statistics={"gram": more}).value, merge(deltas, statistics={"gram": grams}).value)
        > 0.1
    )


def test_statistics_in_another_dtype_are_converted():
    grams, deltas = given(inputs(2, 20, 6))["gram"], random_deltas(2, 9, 6)
    found = merge(deltas, statistics={"gram": [g.float() for g in grams]}).value
    assert found.dtype == torch.float64
    assert relative_error(found, merge(deltas, statistics={"gram": grams}).value) < 1e-5


@pytest.mark.parametrize("name", ["regmean", "lot"])
def test_weights_multiply_the_drift(name):
    samples, deltas = inputs(2, 20, 6), random_deltas(2, 9, 6)
    targets = torch.cat([samples[0] @ deltas[0].T, 3 * samples[1] @ deltas[1].T])
    expected = torch.linalg.lstsq(torch.cat([samples[0], 3 * samples[1]]), targets).solution.T
    found = get_method(name).merge(deltas, statistics=given(samples), weights=[1.0, 9.0]).value
    assert relative_error(found, expected) < 1e-12
