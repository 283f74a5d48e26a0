"""ACTMat against a literal transcription of the paper's equation, and each of its options against its definition."""

import pytest
import torch
from tests.helpers.interference import EPS32, naive, self_grams
from tests.helpers.spectra import random_deltas, shared_rows
from tests.tolerances import F32_SOLVE, F64_IDENTITY, F64_ORACLE, relative_error

from actmat.errors import RecipeError
from actmat.linalg.interference.rule import Filter, InterferenceRule
from actmat.linalg.lowrank import LowRank
from actmat.methods.actmat import ACTMAT

merge = ACTMAT.merge
merge_lowrank = ACTMAT.lowrank.merge


def test_paper_equation_where_the_cutoff_matters():
    deltas = shared_rows(4, 24, 1e-4)
    expected = naive(deltas, self_grams(deltas))
    assert relative_error(merge(deltas).value, expected) < 1e-8
    assert relative_error(merge(deltas, rtol=0.0).value, expected) > 1e-3


def boxed(base, deltas, rtol=None):
    """The paper's boxed formula, less the base: `(sum W C)(sum C)^+ - W_0`."""
    grams = self_grams(deltas)
    cut = base.shape[1] * EPS32 if rtol is None else rtol
    weights = sum((base + d) @ c for d, c in zip(deltas, grams, strict=True))
    return weights @ torch.linalg.pinv(sum(grams), rtol=cut, hermitian=True) - base


def factored(rank, rows=10, columns=24, n_experts=3):
    return [
        b @ a
        for b, a in zip(random_deltas(n_experts, rows, rank), random_deltas(n_experts, rank, columns, seed=4),
                        strict=True)
    ]  # fmt: skip


def test_weight_form_is_the_delta_form_where_s_is_regular():
    base, deltas = random_deltas(1, 9, 7, seed=5)[0], random_deltas(3, 9, 7)
    found = merge(deltas, base=base, form="weight").value
    assert torch.equal(found, merge(deltas).value), "no direction is cut, so the base is not looked at"
    assert relative_error(found, boxed(base, deltas)) < F64_ORACLE


@pytest.mark.parametrize("solver", ["auto", "eigh", "dual", "stacked"])
@pytest.mark.parametrize("rank", [2, 6])
def test_weight_form_where_s_is_singular(rank, solver):
    """It takes the base out of every direction that no delta uses, whichever exact form solves it."""
    base, deltas = random_deltas(1, 10, 24, seed=5)[0], factored(rank)
    found = merge(deltas, base=base, form="weight", solver=solver).value
    assert relative_error(found, boxed(base, deltas)) < 1e-9
    outside = torch.linalg.svd(torch.cat(deltas)).Vh[3 * rank :]
    assert float(((base + found) @ outside.T).norm()) < F64_ORACLE * float(base.norm())
    inside = torch.linalg.svd(torch.cat(deltas)).Vh[: 3 * rank]
    assert relative_error(found @ inside.T, merge(deltas).value @ inside.T) < F64_ORACLE


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_weight_form_in_float32_at_any_size_of_the_deltas(size):
    base, deltas = random_deltas(1, 10, 24, seed=5)[0], [size * d for d in factored(3)]
    found = merge([d.float() for d in deltas], base=base.float(), form="weight").value
    assert relative_error(found, boxed(base, deltas)) < F32_SOLVE


def test_weight_form_of_a_stack_of_experts_that_did_not_move():
    base = torch.stack(random_deltas(2, 4, 6, seed=5))
    moved = random_deltas(2, 4, 6)
    deltas = [torch.stack([d, torch.zeros(4, 6, dtype=torch.float64)]) for d in moved]
    found = merge(deltas, base=base, form="weight")
    assert torch.equal(found.value[1], -base[1]), "no data, no weights: the formula as printed"
    assert relative_error(found.value[0], merge(moved, base=base[0], form="weight").value) < F64_IDENTITY
    assert (found.stats["rank"], found.stats["rank_max"]) == (0, 6)


def test_weight_form_is_refused_where_it_has_no_meaning():
    pair = LowRank(*random_deltas(1, 4, 2), *random_deltas(1, 2, 5))
    with pytest.raises(ValueError, match="form='weight'"):
        merge_lowrank([pair], form="weight")
    with pytest.raises(RecipeError, match="needs the base"):
        merge([pair.dense()], form="weight")
    for wrong in ({"null": "mean"}, {"filter": "tikhonov"}, {"filter": "exponential"}):
        with pytest.raises(RecipeError, match="form='weight' takes"):
            merge([pair.dense()], base=pair.dense(), form="weight", **wrong)
    with pytest.raises(ValueError, match="'hard' or 'adaptive'"):
        InterferenceRule(spectral=Filter("tikhonov"), null="minus_base")


def test_trim_and_center_and_power_change_the_estimate_alone():
    deltas = random_deltas(3, 9, 6)
    median = [d.abs().flatten().sort(descending=True).values[26] for d in deltas]
    trimmed = [torch.where(d.abs() >= m, d, 0.0) for d, m in zip(deltas, median, strict=True)]
    assert relative_error(merge(deltas, trim=0.5).value, naive(deltas, self_grams(trimmed))) < 1e-12
    centered = [d - d.mean(0) for d in deltas]
    assert relative_error(merge(deltas, center=True).value, naive(deltas, self_grams(centered))) < 1e-12
    roots = []
    for gram in self_grams(deltas):
        values, vectors = torch.linalg.eigh(gram)
        roots.append((vectors * values.sqrt()) @ vectors.T)
    assert relative_error(merge(deltas, power=0.5).value, naive(deltas, roots)) < 1e-11
