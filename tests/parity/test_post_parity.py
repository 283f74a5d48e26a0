"""Spaces and post-processing against tensors from public code (see golden_post/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tolerances import F32_PRODUCT
from torch import Tensor

from actmat.extras.research.matrices import merge_matrices
from actmat.linalg.lowrank import LowRank
from actmat.methods.post import Layer, get_step

GOLDEN = Path(__file__).parent / "golden_post"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "index.json").read_text())["cases"]

CORE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "core_sum": ("task_arithmetic", {"scaling": 1.0}, ()),
    "core_mean": ("average", {}, ()),
    "core_ties": ("ties", {"density": 0.1}, ()),
    "core_ties_k30": ("ties", {"density": 0.3}, ()),
    "core_tsv": ("tsv", {}, ()),
    "core_iso": ("task_arithmetic", {"scaling": 1.0}, ("isotropise",)),
    "core_ties_iso": ("ties", {"density": 0.1}, ("isotropise",)),
    "core_ties_iso_k60": ("ties", {"density": 0.6}, ("isotropise",)),
    "core_tsv_iso": ("tsv", {}, ("isotropise",)),
}
"""Oracle -> method, options and steps in the core space."""

AFTER: dict[str, tuple[str, dict[str, float]]] = {
    "svc_sum_a1": ("svc", {"alpha": 1.0, "floor": 1e-12}),
    "svc_mean_a01": ("svc", {"alpha": 0.1, "floor": 1e-12}),
    "svc_ta03_a01": ("svc", {"alpha": 0.1, "floor": 1e-12}),
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
    assert {c["method"] for c in CASES} == {*CORE, *AFTER, "larv_third_party"}
    assert sum(c["compare"] == "numeric" for c in CASES) == 61
    assert len(CASES) == 67


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
    assert step.apply is not None
    deltas = deltas_of(tensors, dtype)
    found = step.apply(tensors["merged_in"].to(dtype), deltas, **step.resolve_options(options)).value
    assert found.dtype == dtype
    assert_meets(case, found, tensors, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c["method"] in AFTER and c["case"] == "lora"], ids=name_of)
def test_steps_on_factors(case: dict[str, Any]) -> None:
    tensors = load_file(GOLDEN / case["file"])
    name, options = AFTER[case["method"]]
    step = get_step(name)
    assert step.apply is not None
    assert step.apply_lowrank is not None
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


def test_larv_scores() -> None:
    (case,) = (c for c in CASES if c["method"] == "larv_third_party")
    tensors = load_file(GOLDEN / case["file"])
    step = get_step("larv").layers
    assert step is not None
    names = [f"layer.{n}" for n in range(6)]
    measures = {
        (n, ""): (Layer("layer.*", i + 1, 6), step.measure(tensors[f"{n}::deltas"][0], tensors[f"{n}::base"]))
        for i, n in enumerate(names)
    }
    contrast, conflict = zip(*(values for _, values in measures.values()), strict=True)
    for own, name in ((contrast, "erank_contrast"), (conflict, "conflict")):
        expected = tensors[f"layers::expected_{name}"].float()
        torch.testing.assert_close(torch.tensor(own), expected, rtol=F32_PRODUCT, atol=0)
    factors = step.factors(measures)
    # its own scales stop at 1; where they do not, they are the continuous ones
    clamped = torch.tensor([min(1.0, factors[n, ""]) for n in names])
    torch.testing.assert_close(clamped, tensors["layers::expected_scale_clamped"].float(), rtol=F32_PRODUCT, atol=0)
    scaled = torch.cat([tensors[f"{n}::deltas"][0] * factors[n, ""] for n in names])
    expected = torch.cat([tensors[f"{n}::expected_delta"] for n in names])
    assert float((scaled - expected).norm() / expected.norm()) <= case["tolerance"]
