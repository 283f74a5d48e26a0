"""ACTMat against a literal transcription of the paper's equation, and each of its options against its definition."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.interference import EPS32, naive, self_grams
from tests.helpers.spectra import random_deltas, shared_rows
from tests.tolerances import relative_error

from actmat.errors import RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods.actmat import ACTMAT

merge = ACTMAT.merge
merge_lowrank = ACTMAT.merge_lowrank


def paper(deltas):
    """`(sum D C) (sum C)^+` with the pseudo-inverse and cut-off that the paper's numbers were made with."""
    estimates = [d.T @ d for d in deltas]
    gram = sum(estimates)
    inverse = torch.linalg.pinv(gram, rtol=gram.shape[0] * EPS32)
    return sum(d @ c for d, c in zip(deltas, estimates, strict=True)) @ inverse


@pytest.mark.parametrize("shape", [(4, 16, 16), (4, 30, 12), (3, 10, 24), (2, 5, 24), (1, 8, 6)])
def test_paper_equation(shape):
    deltas = random_deltas(*shape)
    assert relative_error(merge(deltas).value, paper(deltas)) < 1e-11


def test_paper_equation_where_the_cutoff_matters():
    deltas = shared_rows(4, 24, 1e-4)
    assert relative_error(merge(deltas).value, paper(deltas)) < 1e-8
    assert relative_error(merge(deltas, rtol=0.0).value, paper(deltas)) > 1e-3


def test_it_minimises_the_interference():
    deltas = random_deltas(3, 8, 8)

    def interference(merged):
        return sum(float(((merged - d) @ d.T).square().sum()) for d in deltas)

    best = merge(deltas).value
    for nudge in random_deltas(5, 8, 8, seed=8):
        assert interference(best + 1e-3 * nudge) > interference(best)


def test_it_equals_the_weight_form_where_s_is_regular():
    """`W* = (sum W C)(sum C)^-1`, the boxed formula of the paper."""
    base, deltas = random_deltas(1, 9, 7, seed=5)[0], random_deltas(3, 9, 7)
    grams = self_grams(deltas)
    boxed = sum((base + d) @ c for d, c in zip(deltas, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    assert relative_error(merge(deltas).value, boxed - base) < 1e-12


def test_filtered_out_directions_keep_the_base():
    """LoRA-like deltas: orthogonal to the experts' rows, the merged delta is zero."""
    deltas = [b @ a for b, a in zip(random_deltas(2, 10, 2), random_deltas(2, 2, 12, seed=4), strict=True)]
    rows = torch.cat(deltas)
    outside = torch.linalg.svd(rows).Vh[4:]
    assert float((merge(deltas).value @ outside.T).norm()) < 1e-12


def test_orientation_matters():
    deltas = random_deltas(3, 8, 8)
    assert relative_error(merge([d.T for d in deltas]).value.T, merge(deltas).value) > 0.1


@pytest.mark.parametrize("null", ["zero", "sum", "mean"])
def test_null_policies(null):
    deltas = [b @ a for b, a in zip(random_deltas(3, 9, 2), random_deltas(3, 2, 12, seed=4), strict=True)]
    fill = {"zero": None, "sum": sum(deltas), "mean": sum(deltas) / 3}[null]
    found = merge(deltas, null=null, rtol=0.2).value
    assert relative_error(found, naive(deltas, self_grams(deltas), rtol=0.2, fill=fill)) < 1e-12


def test_trim_and_centre_and_power_change_the_estimate_alone():
    deltas = random_deltas(3, 9, 6)
    median = [d.abs().flatten().sort(descending=True).values[26] for d in deltas]
    trimmed = [torch.where(d.abs() >= m, d, 0.0) for d, m in zip(deltas, median, strict=True)]
    assert relative_error(merge(deltas, trim=0.5).value, naive(deltas, self_grams(trimmed))) < 1e-12
    centred = [d - d.mean(0) for d in deltas]
    assert relative_error(merge(deltas, centre=True).value, naive(deltas, self_grams(centred))) < 1e-12
    roots = []
    for gram in self_grams(deltas):
        values, vectors = torch.linalg.eigh(gram)
        roots.append((vectors * values.sqrt()) @ vectors.T)
    assert relative_error(merge(deltas, power=0.5).value, naive(deltas, roots)) < 1e-11


def test_normalise_makes_experts_count_alike():
    deltas = random_deltas(3, 9, 6)
    loud = [100 * deltas[0], *deltas[1:]]
    grams = [g / g.trace() for g in self_grams(loud)]
    assert relative_error(merge(loud, normalise="norm").value, naive(loud, grams)) < 1e-12


def test_one_steep_tensor_in_float32_and_float64_keeps_one_rank():
    deltas = shared_rows(3, 20, 1e-4)
    ranks = {merge([d.to(t) for d in deltas]).stats["rank"] for t in (torch.float32, torch.float64)}
    assert len(ranks) == 1


@pytest.mark.parametrize(
    "bad", [{"rtol": -1.0}, {"ridge": 0.0}, {"trim": 0.0}, {"power": 3.0}, {"solver": "svd"}, {"rtoll": 1e-6}]
)
def test_options_are_checked(bad):
    with pytest.raises(RecipeError):
        ACTMAT.resolve_options(bad)


def test_low_rank_with_trim_is_refused():
    pair = LowRank(*random_deltas(1, 4, 2), *random_deltas(1, 2, 5))
    with pytest.raises(ValueError, match="trim"):
        merge_lowrank([pair], trim=0.5)
