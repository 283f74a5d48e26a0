"""TIES against an entry-by-entry transcription, in its three public variants, per tensor and over a whole model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.masking import awkward_deltas, call, naive_elect, naive_top
from tests.helpers.spectra import random_deltas
from tests.helpers.survey import run_survey
from tests.tolerances import relative_error
from torch import Tensor

from actmat.errors import RecipeError
from actmat.methods.ties import TIES, kept_entries

ZERO_SIGN = {"original": "majority", "mergekit": "positive", "actmat": "zero"}


def naive_ties(
    deltas: Sequence[Tensor], weights: Sequence[float], densities: Sequence[float], variant: str, reduce: str
) -> Tensor:
    votes = []
    for delta, weight, d in zip(deltas, weights, densities, strict=True):
        n = delta.numel()
        k = {
            "original": min(n, int(d * n) + 1),
            "mergekit": max(1, int(d * n)) if d > 0 else 0,
            "actmat": round(d * n),
        }[variant]
        votes.append(weight * naive_top(delta, k, exact=variant != "original"))
    return naive_elect(votes, weights, reduce=reduce, zero_sign=ZERO_SIGN[variant])


@pytest.mark.parametrize("variant", list(ZERO_SIGN))
def test_counts_of_kept_entries(variant: Any) -> None:
    assert kept_entries(0.0, 10, variant=variant) == 0
    assert kept_entries(1.0, 10, variant=variant) == 10
    assert kept_entries(0.2, 0, variant=variant) == 0
    assert kept_entries(0.01, 10, variant=variant) == {"original": 1, "mergekit": 1, "actmat": 0}[variant]
    assert kept_entries(0.27, 10, variant=variant) == {"original": 3, "mergekit": 2, "actmat": 3}[variant]
    assert kept_entries(0.24, 10, variant=variant) == {"original": 3, "mergekit": 2, "actmat": 2}[variant]


def test_the_record_tells_the_fraction_kept() -> None:
    (delta,) = random_deltas(1, 100)
    merged = TIES.merge([delta], **TIES.resolve_options({"density": 0.25, "variant": "actmat"}))
    assert merged.stats["kept_fraction"] == 0.25
    assert int(torch.count_nonzero(merged.value)) == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", [awkward_deltas, random_deltas])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_global_trim_equals_ties_of_the_concatenated_model(dtype: torch.dtype, make: Any, reduce: str) -> None:
    """Layers of different scale: per-tensor trimming would give another answer."""
    shapes = {"a": (6, 5), "b": (13,), "c": (2, 3, 4)}
    model = {n: [x * 2**i for x in make(3, *s, seed=i, dtype=dtype)] for i, (n, s) in enumerate(shapes.items())}
    whole = [torch.cat([model[n][t].reshape(-1) for n in shapes]) for t in range(3)]
    expected = naive_ties(whole, [1.0] * 3, [0.3] * 3, "original", reduce)
    found = run_survey(TIES, model, TIES.resolve_options({"trim": "global", "density": 0.3, "reduce": reduce}))
    merged = [call(TIES, model[n], survey=found, trim="global", density=0.3, reduce=reduce).reshape(-1) for n in shapes]
    assert relative_error(torch.cat(merged), expected) < (1e-6 if dtype is torch.float32 else 1e-14)
    per_tensor = [call(TIES, model[n], density=0.3, reduce=reduce).reshape(-1) for n in shapes]
    assert relative_error(torch.cat(per_tensor), expected) > 0.05


def test_global_trim_without_a_survey_is_refused() -> None:
    with pytest.raises(RecipeError, match="no survey"):
        call(TIES, random_deltas(2, 4), trim="global")
    assert not TIES.survey.applies(TIES.resolve_options({}))


@pytest.mark.parametrize("density", [0.0, 1.0, [0.0, 1.0, 0.5]])
def test_the_survey_takes_densities_at_the_ends(density: Any) -> None:
    options = {"trim": "global", "density": density}
    deltas = random_deltas(3, 40)
    found = run_survey(TIES, {"w": deltas}, TIES.resolve_options(options))
    assert torch.equal(call(TIES, deltas, survey=found, **options), call(TIES, deltas, density=density))


@pytest.mark.parametrize(("variant", "majority"), [("original", 1), ("actmat", 0)])
def test_only_the_original_variant_asks_for_a_round_of_votes(variant: str, majority: int) -> None:
    options = TIES.resolve_options({"trim": "global", "density": 0.5, "variant": variant})
    assert run_survey(TIES, {"w": [torch.ones(4)]}, options).majority == majority


@pytest.mark.parametrize(("density", "match"), [([0.1], "a list of 1, but 2 experts"), ([0.1, 1.5], r"got \[1.5\]")])
def test_wrong_density_lists_are_refused(density: list[float], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        call(TIES, random_deltas(2, 4), density=density)


def test_rescaling_comes_before_the_weights_and_the_vote() -> None:
    deltas = random_deltas(3, 6, 8)
    weights, densities = [0.5, -1.0, 2.0], [0.2, 0.6, 1.0]
    votes = []
    for delta, weight, density in zip(deltas, weights, densities, strict=True):
        kept = naive_top(delta, int(density * delta.numel()), exact=True)
        votes.append(weight * kept * float(delta.abs().sum() / kept.abs().sum()))
    expected = naive_elect(votes, weights, reduce="mean", zero_sign="positive")
    options = {"weights": weights, "density": densities, "variant": "mergekit", "rescale": "l1"}
    assert relative_error(call(TIES, deltas, **options), expected) < 1e-13
