"""Spaces and post-processing against tensors from public code (see golden_post/README.md)."""

from typing import Any

import pytest
import torch
from tests.parity.cases import Case, all_cases, deltas_of
from torch import Tensor

from actmat.api.matrices import merge_matrices
from actmat.linalg.lowrank import LowRank
from actmat.methods.post import get_step

CASES = all_cases("golden_post")

CORE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "core_sum": ("task_arithmetic", {"scaling": 1.0}, ()),
    "core_mean": ("average", {}, ()),
    "core_ties": ("ties", {"density": 0.1}, ()),
    "core_ties_k30": ("ties", {"density": 0.3}, ()),
    "core_tsv": ("tsv", {}, ()),
    "core_iso": ("task_arithmetic", {"scaling": 1.0}, ("isotropize",)),
    "core_ties_iso": ("ties", {"density": 0.1}, ("isotropize",)),
    "core_ties_iso_k60": ("ties", {"density": 0.6}, ("isotropize",)),
    "core_tsv_iso": ("tsv", {}, ("isotropize",)),
}
"""Oracle -> method, options and steps in the core space."""

AFTER: dict[str, tuple[str, dict[str, float]]] = {
    "subspace_boost_001": ("subspace_boosting", {}),
    "subspace_boost_03": ("subspace_boosting", {"beta": 0.3}),
    "subspace_boost_06": ("subspace_boosting", {"beta": 0.6}),
}
"""Oracle -> step and options, after a delta that is already merged."""


def assert_meets(case: Case, found: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == case.tensors()["weight"]["expected_delta"].shape
    assert bool(found.isfinite().all())
    assert case.compare == "none" or case.error({"weight": found}, dtype) <= 1  # or is not determined by the input


def test_every_oracle_is_used() -> None:
    assert {c.method for c in CASES} == {*CORE, *AFTER}
    assert sum(c.compare == "numeric" for c in CASES) == 47
    assert len(CASES) == 53


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES if c.method in CORE], ids=str)
def test_core_space(case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors()["weight"]
    method, options, post = CORE[case.method]
    pairs = list(zip(tensors["b_t"].to(dtype), tensors["a_t"].to(dtype), strict=True))
    found = merge_matrices(method, pairs, space="core", post=post, **options)
    assert_meets(case, found, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES if c.method in AFTER], ids=str)
def test_steps_after_a_merge(case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors()["weight"]
    name, options = AFTER[case.method]
    step = get_step(name)
    deltas = deltas_of(tensors, dtype)
    found = step.apply(tensors["merged_in"].to(dtype), deltas, **step.resolve_options(options)).value
    assert_meets(case, found, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c.method in AFTER and c.case == "lora"], ids=str)
def test_steps_on_factors(case: Case) -> None:
    tensors = case.tensors()["weight"]
    name, options = AFTER[case.method]
    step = get_step(name)
    factors = [LowRank(*_factors(d)) for d in deltas_of(tensors, torch.float64)]
    merged = LowRank(*_factors(tensors["merged_in"].double()))
    found = step.apply_lowrank(merged, factors, **step.resolve_options(options)).value
    assert_meets(case, found.dense(), torch.float64)
    dense = step.apply(merged.dense(), [f.dense() for f in factors], **step.resolve_options(options)).value
    assert float((found.dense() - dense).norm()) <= 1e-12 * float(dense.norm())


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a matrix of low rank, exact to rounding."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > 1e-6 * s[0]).sum())
    return u[:, :rank] * s[:rank], vh[:rank]
