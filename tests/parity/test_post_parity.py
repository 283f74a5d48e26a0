"""Spaces and post-processing against tensors from public code (see golden_post/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actmat.extras.research.matrices import merge_matrices
from actmat.linalg.lowrank import LowRank
from actmat.methods.post import get_step

GOLDEN = Path(__file__).parent / "golden_post"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "index.json").read_text())["cases"]

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

DTYPES = [torch.float32, torch.float64]


def name_of(case: dict[str, Any]) -> str:
    return f"{case['method']}-{case['case']}"


def deltas_of(tensors: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    stacked = tensors["deltas"] if "deltas" in tensors else tensors["b_t"] @ tensors["a_t"]
    return list(stacked.to(dtype))


def expected_of(case: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, float]:
    """The tensor that a run in this dtype is held to, and how closely."""
    if dtype == torch.float64 and case["tolerance64"] is not None:
        return tensors["expected_delta64"], case["tolerance64"]
    return tensors["expected_delta"], case["tolerance"]


def assert_meets(case: dict[str, Any], found: Tensor, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.shape == tensors["expected_delta"].shape
    assert bool(found.isfinite().all())
    if case["compare"] == "none":  # not determined by the input
        return
    expected, tolerance = expected_of(case, tensors, dtype)
    norm = 1.0 if case["absolute"] else float(expected.double().norm())
    assert float((found.double() - expected.double()).norm()) <= tolerance * norm


def test_every_oracle_is_used() -> None:
    assert {c["method"] for c in CASES} == {*CORE, *AFTER}
    assert sum(c["compare"] == "numeric" for c in CASES) == 47
    assert len(CASES) == 53


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES if c["method"] in CORE], ids=name_of)
def test_core_space(case: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = load_file(GOLDEN / case["file"])
    method, options, post = CORE[case["method"]]
    pairs = list(zip(tensors["b_t"].to(dtype), tensors["a_t"].to(dtype), strict=True))
    found = merge_matrices(method, pairs, space="core", post=post, **options)
    assert found.dtype == dtype
    assert_meets(case, found, tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("case", [c for c in CASES if c["method"] in AFTER], ids=name_of)
def test_steps_after_a_merge(case: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = load_file(GOLDEN / case["file"])
    name, options = AFTER[case["method"]]
    step = get_step(name)
    deltas = deltas_of(tensors, dtype)
    found = step.apply(tensors["merged_in"].to(dtype), deltas, **step.resolve_options(options)).value
    assert found.dtype == dtype
    assert_meets(case, found, tensors, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c["method"] in AFTER and c["case"] == "lora"], ids=name_of)
def test_steps_on_factors(case: dict[str, Any]) -> None:
    tensors = load_file(GOLDEN / case["file"])
    name, options = AFTER[case["method"]]
    step = get_step(name)
    factors = [LowRank(*_factors(d)) for d in deltas_of(tensors, torch.float64)]
    merged = LowRank(*_factors(tensors["merged_in"].double()))
    found = step.apply_lowrank(merged, factors, **step.resolve_options(options)).value
    assert_meets(case, found.dense(), tensors, torch.float64)
    dense = step.apply(merged.dense(), [f.dense() for f in factors], **step.resolve_options(options)).value
    assert float((found.dense() - dense).norm()) <= 1e-12 * float(dense.norm())


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a matrix of low rank, exact to rounding."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > 1e-6 * s[0]).sum())
    return u[:, :rank] * s[:rank], vh[:rank]
