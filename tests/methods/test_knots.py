"""KnOTS in both orders against transcriptions, and the survey over several tensors."""

import pytest
import torch
from tests.helpers.spectra import random_deltas, random_lowrank, seeded
from tests.helpers.survey import run_survey
from tests.tolerances import relative_error

from actmat.extras.research import iso_c, tsv
from actmat.extras.research.knots import KNOTS, merge


def concatenated(deltas, atol=1e-5):
    """`U`, `s` and the slices `V_t^T` of the SVD of the concatenation, singular values above `atol`."""
    u, s, vh = torch.linalg.svd(torch.cat([d.double() for d in deltas], 1), full_matrices=False)
    keep = s > atol
    return u[:, keep], s[keep], vh[keep].split(deltas[0].shape[1], dim=1)


def naive_ties(coordinates, density):
    """Trim each expert to its top coordinates, elect signs by the sum, average what agrees; over a list of layers."""
    flat = [torch.cat([layer[t].reshape(-1) for layer in coordinates]) for t in range(len(coordinates[0]))]
    total = flat[0].numel()
    kept = [torch.where(f.abs() >= f.abs().kthvalue(total - int(total * density)).values, f, 0.0) for f in flat]
    stacked = torch.stack(kept)
    sign = stacked.sum(0).sign()
    agree = stacked * (stacked.sign() == sign) * (sign != 0)
    merged = agree.sum(0) / (agree != 0).sum(0).clamp_min(1)
    parts = merged.split([layer[0].numel() for layer in coordinates])
    return [p.view(layer[0].shape) for p, layer in zip(parts, coordinates, strict=True)]


def survey(*model):
    return run_survey(KNOTS, dict(enumerate(model)), KNOTS.resolve_options({}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_trimming_is_global_over_the_model(dtype):
    model = [random_deltas(3, 10, 14, dtype=dtype), [9 * d for d in random_deltas(3, 12, 8, seed=1, dtype=dtype)]]
    bases = [concatenated(deltas) for deltas in model]
    expected = naive_ties([[s[:, None] * v for v in slices] for _, s, slices in bases], 0.2)
    vote = survey(*model)
    for deltas, (u, _, _), core in zip(model, bases, expected, strict=True):
        assert relative_error(merge(deltas, survey=vote).value, u @ core) < (1e-10 if dtype == torch.float64 else 1e-5)
        assert relative_error(merge(deltas, trim="tensor").value, u @ core) > 1e-2


def test_the_survey_is_asked_for_only_where_it_matters():
    hook = KNOTS.survey
    for options in ({"trim": "tensor"}, {"rule": "tsv"}, {"rule": "dare"}):
        assert not hook.applies(KNOTS.resolve_options(options))


def test_survey_of_factors_equals_survey_of_dense():
    model = [random_lowrank([2] * 3, 20, 14), random_lowrank([2] * 3, 9, 30, seed=5)]
    dense = survey(*([d.dense() for d in deltas] for deltas in model))
    assert survey(*model) == pytest.approx(dense, rel=1e-10)


def test_opposite_experts_cancel_whatever_the_signs_of_the_singular_vectors():
    (delta,) = random_deltas(1, 6, 10)
    assert not merge([delta, -delta], density=1.0).value.any()


def test_official_task_arithmetic_is_the_sum_of_what_is_kept():
    deltas = random_deltas(3, 9, 13)
    assert relative_error(merge(deltas, rule="task_arithmetic").value, sum(deltas)) < 1e-12
    u, _, _ = concatenated(deltas, atol=5.5)
    assert 0 < u.shape[1] < 9
    expected = u @ u.mT @ sum(deltas)
    assert relative_error(merge(deltas, rule="task_arithmetic", atol=5.5).value, expected) < 1e-12


@pytest.mark.parametrize("rule", ["tsv", "iso_c"])
def test_official_order_with_an_equivariant_rule_is_that_rule(rule):
    deltas = random_deltas(3, 11, 17)
    plain = {"tsv": tsv.merge, "iso_c": iso_c.merge}[rule](deltas).value
    assert relative_error(merge(deltas, rule=rule).value, plain) < 1e-11


def test_dare_keeps_the_expected_fraction_and_is_unbiased():
    deltas = random_deltas(2, 12, 40)
    u, s, slices = concatenated(deltas)
    total = sum(s[:, None] * v for v in slices)
    draws = torch.stack(
        [u.mT @ merge(deltas[:1], rule="dare", density=0.25, generator=seeded(seed)).value for seed in range(8)]
    )
    first = torch.linalg.svd(deltas[0], full_matrices=False)
    coordinates = first.U.mT @ deltas[0]
    masked = first.U.mT @ (u @ draws[0])
    kept = masked.abs() > 1e-9
    assert relative_error(masked[kept], 4 * coordinates[kept]) < 1e-10
    assert abs(float(kept.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    many = torch.stack([merge(deltas, rule="dare", density=0.5, generator=seeded(seed)).value for seed in range(300)])
    deviation = float((many.mean(0) - u @ total).norm() / many.std(0).norm()) * 300**0.5
    assert 0.8 < deviation < 1.2


def test_a_zero_expert_leaves_ties_as_it_is():
    # With trimming over each tensor and over the model alike: its coordinates are exactly zero, so it has no vote.
    deltas = random_deltas(2, 8, 12, dtype=torch.float32)
    with_zero = [deltas[0], torch.zeros(8, 12), deltas[1]]
    assert relative_error(merge(with_zero).value, merge(deltas).value) < 1e-6
    assert relative_error(merge(with_zero, survey=survey(with_zero)).value, merge(deltas).value) < 1e-6


def test_batches_of_unequal_rank():
    deltas = random_deltas(2, 3, 8, 10)
    for delta in deltas:
        delta[1] = 0
        delta[2, 3:] = 0
    for options in ({"rule": "tsv"}, {"rule": "iso_c", "order": "actmat"}, {"rule": "task_arithmetic"}):
        merged = merge(deltas, **options)
        assert merged.stats == {"rank_min": 0, "rank_max": 8}
        for element in range(3):
            alone = merge([d[element] for d in deltas], **options).value
            assert relative_error(merged.value[element], alone) < 1e-10


def test_padding_of_lower_ranks_is_not_counted_by_ties():
    one = random_deltas(2, 8, 10)
    padded = [torch.stack([d, torch.zeros_like(d)]) for d in one]
    merged = merge(padded).value
    assert relative_error(merged[0], merge(one).value) < 1e-12
    assert not merged[1].any()
    assert survey(padded) == pytest.approx(survey(one), rel=1e-12)
