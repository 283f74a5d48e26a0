"""Every law that a member of the interference family declares, its stages, its low-rank form and its signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.experts import OnePass
from tests.helpers.spectra import orthogonal, random_deltas
from tests.tolerances import relative_error
from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import MergeMethod, get_method

NAMES = "actmat actmat_ridge wudi swudi aswudi regmean lot"
FAMILY = [get_method(name) for name in NAMES.split()]
TOLERANCE = 1e-10


def needs(method: MergeMethod, count: int, width: int, order: list[int] | None = None) -> dict[str, Any]:
    """Gram matrices for the methods that want them, in the order of the experts."""
    if not method.needs_statistics:
        return {}
    grams = [g @ g.T for g in random_deltas(count, width, width, seed=77)]
    return {"statistics": {"gram": [grams[i] for i in order or range(count)]}}


def run(method: MergeMethod, deltas: list[Tensor], order: list[int] | None = None) -> Tensor:
    return method.merge(deltas, **needs(method, len(deltas), deltas[0].shape[-1], order)).value


def permutation(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas, order = random_deltas(*shape), list(range(shape[0]))[::-1]
    return relative_error(run(method, [deltas[i] for i in order], order), run(method, deltas))


def single(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    delta = random_deltas(1, *shape[1:])
    return relative_error(run(method, delta), delta[0])


def identical(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    delta = random_deltas(1, *shape[1:])[0]
    return relative_error(run(method, [delta] * shape[0]), delta)


def homogeneous(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas = random_deltas(*shape)
    return relative_error(run(method, [1e-3 * d for d in deltas]), 1e-3 * run(method, deltas))


def odd(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas = random_deltas(*shape)
    return relative_error(run(method, [-d for d in deltas]), -run(method, deltas))


def left_orthogonal(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas, q = random_deltas(*shape), orthogonal(shape[1], 3)
    return relative_error(run(method, [q @ d for d in deltas]), q @ run(method, deltas))


def right_orthogonal(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas, q = random_deltas(*shape), orthogonal(shape[2], 3)
    return relative_error(run(method, [d @ q for d in deltas]), run(method, deltas) @ q)


def orthogonal_rows_sum(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    n_experts, rows, width = shape
    basis, each = orthogonal(width, 4), width // n_experts
    parts = random_deltas(n_experts, rows, each)
    deltas = [p @ basis[t * each : (t + 1) * each] for t, p in enumerate(parts)]
    return relative_error(run(method, deltas), sum(deltas))


def zero_expert(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    deltas = random_deltas(*shape)
    return relative_error(run(method, [*deltas, torch.zeros_like(deltas[0])]), run(method, deltas))


def zeros(method: MergeMethod, shape: tuple[int, int, int]) -> float:
    return float(run(method, [torch.zeros(shape[1:], dtype=torch.float64)] * shape[0]).abs().max() * 1e300)


LAWS: dict[str, Callable[[MergeMethod, tuple[int, int, int]], float]] = {
    f.__name__: f
    for f in (
        permutation,
        single,
        identical,
        homogeneous,
        odd,
        left_orthogonal,
        right_orthogonal,
        orthogonal_rows_sum,
        zero_expert,
        zeros,
    )
}
DECLARED = [pytest.param(m, law, id=f"{m.name}-{law}") for m in FAMILY for law in sorted(m.laws)]


@pytest.mark.parametrize(("method", "law"), DECLARED)
@pytest.mark.parametrize("shape", [(3, 9, 9), (3, 20, 6), (2, 3, 12)], ids=["square", "tall", "few rows"])
def test_declared_law(method, law, shape):
    assert LAWS[law](method, shape) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("actmat_ridge", "single"),
        ("swudi", "identical"),
        ("regmean", "zero_expert"),
    ],
)
def test_laws_that_are_not_declared_do_not_hold(name, law):
    """The declarations are complete: other laws fail by far."""
    method = get_method(name)
    if name == "swudi":  # at time 300 the flow has all but arrived
        method = MergeMethod(
            name="early",
            merge=lambda deltas: get_method(name).merge(deltas, time=1.0),
            acts_on="matrix",
        )
    assert law not in get_method(name).laws
    assert LAWS[law](method, (2, 3, 12)) > 1e-3


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_merge_is_finish_of_prepare(method):
    deltas, given = random_deltas(3, 8, 6), needs(method, 3, 6)
    assert method.stages is not None
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


@pytest.mark.parametrize("method", [m for m in FAMILY if m.lowrank], ids=lambda m: m.name)
def test_low_rank_equals_dense(method):
    pairs = zip(random_deltas(3, 14, 2), random_deltas(3, 2, 18, seed=9), strict=True)
    deltas = [LowRank(b, a) for b, a in pairs]
    given = needs(method, 3, 18)
    found = method.lowrank.merge(deltas, **given)
    expected = method.merge([d.dense() for d in deltas], **given)
    assert relative_error(found.value.dense(), expected.value) < TOLERANCE
    assert found.value.rank <= 6
    assert found.stats.get("rank", 0) == expected.stats.get("rank", 0)


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_one_pass_dtype_shape_and_documented_options(method):
    deltas = [d.float().mT for d in random_deltas(3, 7, 2, 5)]
    given = {"statistics": {"gram": [torch.eye(2)] * 3}} if method.needs_statistics else {}
    deltas = [d.transpose(0, 1) for d in deltas]  # (5, 7, 2), not contiguous
    merged = method.merge(OnePass(deltas), **given)
    assert method.access.one_pass
    assert merged.value.dtype == torch.float32
    assert merged.value.shape == (5, 7, 2)
    assert all(o.doc for o in method.options.values()), "every option has a line in the docstring"
    assert method.is_weighted


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_workspace_grows_with_what_it_holds(method):
    options = method.resolve_options({})
    small, tall = method.cost.workspace((64, 64), 4, options), method.cost.workspace((256, 64), 4, options)
    assert small >= 2 * 64 * 64
    assert tall - small >= 192 * 64
    assert method.cost.workspace((3, 64, 64), 4, options) > 2 * 64 * 64 + small


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.name)
def test_float32_is_close_to_float64(method):
    deltas, given = random_deltas(3, 20, 12), needs(method, 3, 12)
    exact = method.merge(deltas, **given).value
    assert relative_error(method.merge([d.float() for d in deltas], **given).value, exact) < 1e-4
