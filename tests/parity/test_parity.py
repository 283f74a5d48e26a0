"""Every method against tensors produced by its authors' own code (see golden/README.md, closed_forms/README.md).

Float32 runs are held to the tolerance of the official float32 result; float64 runs to the much tighter tolerance of
the official function on float64 inputs, where that exists.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.helpers.survey import call, run_survey
from tests.parity.cases import ORACLE_METHODS, Case, all_cases, deltas_of
from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method

CASES = all_cases("golden", "closed_forms")
NUMERIC = [c for c in CASES if c.compare == "numeric"]
ILL_POSED = [c for c in CASES if c.compare != "numeric"]
DTYPES = (torch.float32, torch.float64)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def merge_case(case: Case, dtype: torch.dtype, **changes: Any) -> dict[str, Tensor]:
    """Merged delta of every tensor of a case; `changes` are put over the options of the method."""
    stored = case.tensors()
    deltas = {n: deltas_of(t, dtype) for n, t in stored.items()}
    surveys: dict[str, Any] = {}
    out = {}
    for name, tensors in stored.items():
        method_name, table = case.rule(name, tensors)
        extra = dict(table) | changes
        weights, count = extra.pop("weights", None), extra.pop("experts", None)
        if "fisher_t" in tensors and extra.get("normalize") == "tensor" and len(stored) > 1:
            weights, extra["normalize"] = _model_wide(stored, weights, extra["floor"], case.T), "none"
        if method_name == "regmean" and "gram_t" not in tensors:
            method_name, extra = "average", {}
        method = get_method(method_name)
        options = method.resolve_options(extra)
        if method_name not in surveys:
            surveys[method_name] = run_survey(method, deltas, options)
        out[name] = call(
            method,
            deltas[name][:count],
            options,
            base=tensors["base"].to(dtype) if "base" in tensors else None,
            statistics=_statistics(tensors, dtype),
            weights=None if weights is None else weights[: len(deltas[name][:count])],
            survey=surveys[method_name],
        ).value
    return out


def _statistics(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, list[Tensor]]:
    kinds = {"gram": "gram_t", "fisher": "fisher_t"}
    return {kind: list(tensors[key].to(dtype)) for kind, key in kinds.items() if key in tensors}


def _model_wide(
    stored: Mapping[str, Mapping[str, Tensor]], weights: list[float] | None, floor: float, n_experts: int
) -> list[float]:
    """Weights that divide every expert's Fisher by its norm over the whole model."""
    squares = torch.stack([t["fisher_t"].double().flatten(1).square().sum(1) for t in stored.values()]).sum(0)
    share = torch.tensor(weights or [1.0] * n_experts, dtype=torch.float64)[:n_experts]
    return (share / (squares.sqrt() + floor)).tolist()


def test_every_oracle_has_a_method() -> None:
    assert {c.method for c in CASES} == set(ORACLE_METHODS)
    assert len(CASES) == 235 + 32


@pytest.mark.parametrize("case", NUMERIC, ids=str)
def test_numbers_agree(case: Case) -> None:
    for dtype in DTYPES:
        out = merge_case(case, dtype)
        assert all(v.dtype == dtype for v in out.values())
        assert case.error(out, dtype) <= 1, dtype


@pytest.mark.parametrize("case", [c for c in NUMERIC if c.status == "float32_cutoff"], ids=str)
def test_without_the_float32_cut_off_float64_keeps_every_direction(case: Case) -> None:
    n_in = case.tensors()["weight"]["base"].shape[-1]
    out = merge_case(case, torch.float64, rtol=n_in * torch.finfo(torch.float64).eps)
    assert case.distance(out, "expected_delta64") <= case.tolerance64


def _has_low_rank_form(case: Case) -> bool:
    factored = all({"a_t", "b_t"} <= t.keys() for t in case.tensors().values())
    return factored and get_method(ORACLE_METHODS[case.method][0]).lowrank is not None


@each_dtype
@pytest.mark.parametrize("case", [c for c in NUMERIC if _has_low_rank_form(c)], ids=str)
def test_the_low_rank_form_agrees_too(case: Case, dtype: torch.dtype) -> None:
    name, table = ORACLE_METHODS[case.method]
    method, stored = get_method(name), case.tensors()
    options = method.resolve_options(table)
    factors = {
        n: [LowRank(b, a) for b, a in zip(t["b_t"].to(dtype), t["a_t"].to(dtype), strict=True)]
        for n, t in stored.items()
    }
    # A threshold is one of the coordinates, so the survey must see the form that is merged, to the last bit.
    survey = run_survey(method, factors, options)
    needs = {"survey": survey} if "survey" in method.needs else {}
    out = {n: method.lowrank.merge(f, **needs, **options).value.dense() for n, f in factors.items()}
    assert case.error(out, dtype) <= 1


@each_dtype
@pytest.mark.parametrize("case", ILL_POSED, ids=str)
def test_ill_posed_results_are_finite_and_keep_what_the_input_determines(case: Case, dtype: torch.dtype) -> None:
    stored = case.tensors()["weight"]
    out = merge_case(case, dtype)["weight"]
    assert out.shape == deltas_of(stored, dtype)[0].shape
    assert bool(out.isfinite().all())
    if case.compare != "invariants":
        return
    on_span = stored["expected_delta_on_span"].double()
    total = deltas_of(stored, torch.float64)
    u, s, v = torch.linalg.svd(sum(total[1:], total[0]), full_matrices=False)
    rank = int((s > 1e-9 * s[0]).sum())
    u, v = u[:, :rank], v[:rank]
    projected = u @ (u.mT @ out.double() @ v.mT) @ v
    assert float((projected - on_span).norm() / on_span.norm()) <= case.tolerance
    values = stored["expected_singular_values"].double()
    assert float((torch.linalg.svdvals(out.double()) - values).norm() / values.norm()) <= case.tolerance
