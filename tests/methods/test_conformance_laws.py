"""Every law that a method declares, on well-conditioned and on rank-deficient experts, in float64."""

from __future__ import annotations

import typing
from collections.abc import Callable

import pytest
import torch
from tests.helpers.experts import Experts, merged, usable_experts
from tests.helpers.spectra import orthogonal
from tests.tolerances import F32_ELEMENTWISE, relative_error

from actmat.methods import MergeMethod, all_methods
from actmat.methods.facets import Law

LAW_TOLERANCE = 1e-12
N_OUT, N_IN = 9, 12

INPUTS = {
    "full": Experts.random(4, (N_OUT, N_IN), seed=1),
    "rank_deficient": Experts.random(4, (N_OUT, N_IN), rank=2, seed=2),
    "tall": Experts.random(3, (N_IN, N_OUT), seed=3),
}


def permutation(method: MergeMethod, experts: Experts) -> float:
    count = usable_experts(method, len(experts.deltas))
    some = experts.with_deltas(experts.deltas[:count])
    order = list(reversed(range(count)))
    return relative_error(merged(method, some.permuted(order)), merged(method, some))


def single(method: MergeMethod, experts: Experts) -> float:
    one = experts.with_deltas(experts.deltas[:1])
    return relative_error(merged(method, one), one.deltas[0])


def identical(method: MergeMethod, experts: Experts) -> float:
    same = experts.with_deltas([experts.deltas[0].clone() for _ in experts.deltas])
    return relative_error(merged(method, same), experts.deltas[0])


def homogeneous(method: MergeMethod, experts: Experts) -> float:
    scaled = experts.with_deltas([3.7 * d for d in experts.deltas])
    return relative_error(merged(method, scaled), 3.7 * merged(method, experts))


def odd(method: MergeMethod, experts: Experts) -> float:
    return relative_error(merged(method, experts.with_deltas([-d for d in experts.deltas])), -merged(method, experts))


def left_orthogonal(method: MergeMethod, experts: Experts) -> float:
    n_out, n_in = experts.base.shape
    q = orthogonal(n_out, 5)
    rotated = experts.rotated(q, torch.eye(n_in, dtype=torch.float64))
    return relative_error(merged(method, rotated), q @ merged(method, experts))


def right_orthogonal(method: MergeMethod, experts: Experts) -> float:
    n_out, n_in = experts.base.shape
    p = orthogonal(n_in, 6)
    rotated = experts.rotated(torch.eye(n_out, dtype=torch.float64), p)
    return relative_error(merged(method, rotated), merged(method, experts) @ p)


def orthogonal_rows_sum(method: MergeMethod, experts: Experts) -> float:
    n_in = experts.base.shape[-1]
    basis = orthogonal(n_in, 8)
    share = n_in // len(experts.deltas)
    spaces = [basis[t * share : (t + 1) * share] for t in range(len(experts.deltas))]
    apart = experts.with_deltas([d @ v.mT @ v for d, v in zip(experts.deltas, spaces, strict=True)])
    return relative_error(merged(method, apart), torch.stack(apart.deltas).sum(0))


def zero_expert(method: MergeMethod, experts: Experts) -> float:
    count = usable_experts(method, len(experts.deltas)) - 1
    some = experts.with_deltas(experts.deltas[:count])
    padded = experts.with_deltas([*some.deltas, torch.zeros_like(experts.base)])
    return relative_error(merged(method, padded), merged(method, some))


def zeros(method: MergeMethod, experts: Experts) -> float:
    nothing = merged(method, experts.with_deltas([torch.zeros_like(d) for d in experts.deltas]))
    return 0.0 if torch.equal(nothing, torch.zeros_like(nothing)) else float("inf")


CHECKS: dict[str, Callable[[MergeMethod, Experts], float]] = {
    "permutation": permutation,
    "single": single,
    "identical": identical,
    "homogeneous": homogeneous,
    "odd": odd,
    "left_orthogonal": left_orthogonal,
    "right_orthogonal": right_orthogonal,
    "orthogonal_rows_sum": orthogonal_rows_sum,
    "zero_expert": zero_expert,
    "zeros": zeros,
}


def test_every_law_of_the_contract_has_a_check() -> None:
    assert set(CHECKS) == set(typing.get_args(Law))


@pytest.mark.parametrize("exponent", [-100, -70, -50, 50, 70, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("method", [m for m in all_methods() if "homogeneous" in m.laws], ids=lambda m: m.name)
def test_homogeneous_methods_are_so_at_any_size(method: MergeMethod, dtype: torch.dtype, exponent: int) -> None:
    """Deltas from 1e-31 to 1e29."""
    experts = Experts.random(usable_experts(method, 3), (N_OUT, N_IN), seed=1).to(dtype)
    far = experts.with_deltas([torch.ldexp(d, torch.tensor(exponent)) for d in experts.deltas])
    found = merged(method, far).double() * 2.0**-exponent
    assert relative_error(found, merged(method, experts)) <= F32_ELEMENTWISE


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("method", "law"), [pytest.param(m, law, id=f"{m.name}-{law}") for m in all_methods() for law in sorted(m.laws)]
)
def test_declared_law_holds(method: MergeMethod, law: str, inputs: str) -> None:
    assert CHECKS[law](method, INPUTS[inputs]) <= LAW_TOLERANCE
