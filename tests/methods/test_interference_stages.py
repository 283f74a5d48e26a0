"""Stages of the interference family: sums over the experts that variants and members share."""

import pytest
import torch
from tests.helpers.spectra import random_deltas

from actmat.methods import get_method

NAMES = "actmat actmat_ridge wudi swudi aswudi regmean lot"
FAMILY = [get_method(name) for name in NAMES.split()]


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_merge_is_finish_of_prepare(method):
    assert method.access.one_pass
    assert method.is_weighted
    deltas = random_deltas(3, 8, 6)
    grams = [g @ g.T for g in random_deltas(3, 6, 6, seed=77)]
    given = {"statistics": {"gram": grams}} if method.needs_statistics else {}
    options = method.resolve_options({})
    state = method.stages.prepare(deltas, **given, **options, weights=[1.0, 2.0, 0.5])
    staged = method.stages.finish(state, **given, **options, weights=[1.0, 2.0, 0.5])
    merged = method.merge(deltas, **given, **options, weights=[1.0, 2.0, 0.5])
    assert torch.equal(staged.value, merged.value)
    assert dict(staged.stats) == dict(merged.stats)


@pytest.mark.parametrize(
    ("name", "variant", "shared"),
    [
        ("actmat", {"rtol": 1e-3}, True),
        ("actmat", {"filter": "exponential", "time": 2.0}, True),
        ("actmat", {"trim": 0.5}, False),
        ("actmat", {"power": 0.5}, False),
        ("actmat", {"null": "sum"}, False),
        ("actmat", {"weights": (1.0, 2.0)}, False),
        ("swudi", {"time": 5.0}, True),
        ("wudi", {"optimizer": "adam"}, False),
        ("regmean", {"form": "weight"}, True),
        ("regmean", {"off_diagonal": 0.9}, False),
    ],
)
def test_variants_share_the_sums_exactly_when_they_may(name, variant, shared):
    method = get_method(name)
    plain = method.resolve_options({})
    assert (method.stages.key(plain) == method.stages.key({**plain, **variant})) is shared


def test_members_share_the_sums_too():
    ridge, plain = get_method("actmat_ridge"), get_method("actmat")
    assert ridge.stages.key(ridge.resolve_options({})) == plain.stages.key(plain.resolve_options({}))
    assert get_method("regmean").stages.key({}) != plain.stages.key({})
