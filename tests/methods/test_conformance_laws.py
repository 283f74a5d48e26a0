"""Every law that a method declares, on well-conditioned and on rank-deficient experts, in float64."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts, merged, usable_experts
from tests.helpers.spectra import orthogonal
from tests.tolerances import F32_ELEMENTWISE, relative_error
from torch import Tensor

from actmat.methods import MergeMethod, all_methods, get_method
from actmat.methods.facets import Law

LAW_TOLERANCE = 1e-12
N_OUT, N_IN = 9, 12
Rule = Callable[[Experts], Tensor]

INPUTS = {
    "full": Experts.random(4, (N_OUT, N_IN), seed=1),
    "rank_deficient": Experts.random(4, (N_OUT, N_IN), rank=2, seed=2),
    "tall": Experts.random(3, (N_IN, N_OUT), seed=3),
    "few_rows": Experts.random(2, (3, N_IN), seed=4),
}


def permutation(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.permuted(list(range(len(experts.deltas)))[::-1])), rule(experts))


def single(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas(experts.deltas[:1])), experts.deltas[0])


def identical(rule: Rule, experts: Experts) -> float:
    same = experts.with_deltas([experts.deltas[0].clone() for _ in experts.deltas])
    return relative_error(rule(same), experts.deltas[0])


def homogeneous(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas([3.7 * d for d in experts.deltas])), 3.7 * rule(experts))


def odd(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas([-d for d in experts.deltas])), -rule(experts))


def left_orthogonal(rule: Rule, experts: Experts) -> float:
    q_OO, n_in = orthogonal(experts.base.shape[0], 5), experts.base.shape[1]
    return relative_error(rule(experts.rotated(q_OO, torch.eye(n_in, dtype=torch.float64))), q_OO @ rule(experts))


def right_orthogonal(rule: Rule, experts: Experts) -> float:
    n_out, p_II = experts.base.shape[0], orthogonal(experts.base.shape[1], 6)
    return relative_error(rule(experts.rotated(torch.eye(n_out, dtype=torch.float64), p_II)), rule(experts) @ p_II)


def orthogonal_rows_sum(rule: Rule, experts: Experts) -> float:
    n_in = experts.base.shape[-1]
    basis = orthogonal(n_in, 8)
    share = n_in // len(experts.deltas)
    spaces = [basis[t * share : (t + 1) * share] for t in range(len(experts.deltas))]
    apart = experts.with_deltas([d @ v.mT @ v for d, v in zip(experts.deltas, spaces, strict=True)])
    return relative_error(rule(apart), torch.stack(apart.deltas).sum(0))


def zero_expert(rule: Rule, experts: Experts) -> float:
    some = experts.with_deltas(experts.deltas[:-1])
    return relative_error(rule(experts.with_deltas([*some.deltas, torch.zeros_like(experts.base)])), rule(some))


def zeros(rule: Rule, experts: Experts) -> float:
    nothing = rule(experts.with_deltas([torch.zeros_like(d) for d in experts.deltas]))
    return float("inf") if nothing.any() else 0.0


CHECKS: dict[str, Callable[[Rule, Experts], float]] = {
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


def gap(law: str, method: MergeMethod, experts: Experts, **options: Any) -> float:
    """How far a method is from obeying a law on these experts, as many of them as it takes."""
    some = experts.with_deltas(experts.deltas[: usable_experts(method, len(experts.deltas))])
    return CHECKS[law](functools.partial(merged, method, **options), some)


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
    assert gap(law, method, INPUTS[inputs]) <= LAW_TOLERANCE


@pytest.mark.parametrize("options", [{"density": 0.1}, {"density": 0.3, "k": 2, "smoothing": "linear"}], ids=str)
def test_dc_merge_keeps_its_laws_under_options(options: dict[str, Any]) -> None:
    method = get_method("dc_merge")
    assert max(gap(law, method, INPUTS["tall"], **options) for law in method.laws) < 1e-10


@pytest.mark.parametrize("order", ["official", "actmat"])
@pytest.mark.parametrize("rule", ["task_arithmetic", "tsv", "iso_c"])
def test_spectral_inner_rules_of_knots_obey_both_orthogonal_laws(order: str, rule: str) -> None:
    laws = ("permutation", "odd", "left_orthogonal", "right_orthogonal", "zeros")
    assert max(gap(law, get_method("knots"), INPUTS["full"], rule=rule, order=order) for law in laws) < 1e-10


@pytest.mark.parametrize(
    ("name", "law", "options"),
    [("actmat_ridge", "single", {}), ("swudi", "identical", {"time": 1.0}), ("regmean", "zero_expert", {})],
)
def test_laws_that_are_not_declared_do_not_hold(name: str, law: str, options: dict[str, Any]) -> None:
    """The declarations are complete: other laws fail by far. (At time 300 the flow of swudi has all but arrived.)"""
    assert law not in get_method(name).laws
    assert gap(law, get_method(name), INPUTS["few_rows"], **options) > 1e-3
