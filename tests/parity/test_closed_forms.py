"""The closed forms of 2025-26 against tensors made by their authors' public code (see closed_forms/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.helpers.survey import call
from tests.tolerances import relative_error
from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method

GOLDEN = Path(__file__).parent / "closed_forms"

ORACLES: dict[str, tuple[str, dict[str, Any]]] = {
    "cart_adarank": ("cart", {"rank": 0.16, "scaling": 2.3}),
    "cart_corespace": ("cart", {"rank": 0.16, "rounding": "up"}),
    "cart_in_ace": ("average", {}),
    "dc_lora_avg": ("dc_merge", {"k": 16, "smoothing": "mean"}),
    "dc_lora_linear": ("dc_merge", {"k": 16, "smoothing": "linear"}),
    "dc_lora_linear_k10": ("dc_merge", {"k": 16, "smoothing": "linear", "density": 0.1}),
    "dc_merge": ("dc_merge", {}),
    "dc_merge_k10": ("dc_merge", {"density": 0.1}),
}


@dataclass(frozen=True)
class Case:
    """One golden answer; fields as in `index.json`."""

    file: str
    method: str
    case: str
    status: str
    tolerance: float | None
    tolerance64: float | None

    def __str__(self) -> str:
        return f"{self.method}-{self.case}"

    def tensors(self) -> dict[str, Tensor]:
        return _all_tensors(self.file)[f"{self.method}::{self.case}"]

    def deltas(self, dtype: torch.dtype) -> list[Tensor]:
        stored = self.tensors()
        every = stored["deltas"] if "deltas" in stored else stored["b_t"] @ stored["a_t"]
        return [d.clone() for d in every.to(dtype)]


@cache
def _all_tensors(file: str) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    with safe_open(GOLDEN / file, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 - no mapping
            name, _, part = key.rpartition("::")
            found.setdefault(name, {})[part] = stored.get_tensor(key)
    return found


CASES = [Case(**entry) for entry in json.loads((GOLDEN / "index.json").read_text())["cases"]]
NUMERIC = [c for c in CASES if c.status != "ill_posed"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def expected(case: Case, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The stored answer for a run in this dtype, and how near it must come."""
    stored = case.tensors()
    assert case.tolerance is not None
    if dtype == torch.float64 and case.tolerance64 is not None:
        return stored["expected_delta64"], case.tolerance64
    return stored["expected_delta"], case.tolerance


def merged(case: Case, deltas: list[Tensor]) -> Tensor:
    name, options = ORACLES[case.method]
    method = get_method(name)
    base = {"base": case.tensors()["base"].to(deltas[0].dtype)} if method.needs_base else {}
    return call(method, deltas, method.resolve_options(options), **base).value


def test_every_oracle_is_compared() -> None:
    assert {c.method for c in CASES} == set(ORACLES)
    assert len(CASES) == 32


@DTYPES
@pytest.mark.parametrize("case", NUMERIC, ids=str)
def test_numbers_agree(case: Case, dtype: torch.dtype) -> None:
    out = merged(case, case.deltas(dtype))
    want, tolerance = expected(case, dtype)
    assert out.dtype == dtype
    assert relative_error(out, want) <= tolerance


def _factored(case: Case) -> bool:
    return {"a_t", "b_t"} <= case.tensors().keys() and get_method(ORACLES[case.method][0]).lowrank is not None


@DTYPES
@pytest.mark.parametrize("case", [c for c in NUMERIC if _factored(c)], ids=str)
def test_the_low_rank_form_agrees_too(case: Case, dtype: torch.dtype) -> None:
    name, options = ORACLES[case.method]
    method, stored = get_method(name), case.tensors()
    assert method.lowrank is not None
    factors = [LowRank(b, a) for b, a in zip(stored["b_t"].to(dtype), stored["a_t"].to(dtype), strict=True)]
    out = method.lowrank.merge(factors, **method.resolve_options(options)).value.dense()
    want, tolerance = expected(case, dtype)
    assert relative_error(out, want) <= tolerance


@DTYPES
@pytest.mark.parametrize("case", [c for c in CASES if c.status == "ill_posed"], ids=str)
def test_ill_posed_results_are_finite(case: Case, dtype: torch.dtype) -> None:
    deltas = case.deltas(dtype)
    out = merged(case, deltas)
    assert out.shape == deltas[0].shape
    assert bool(out.isfinite().all())


def test_the_table_names_options_that_exist() -> None:
    for name, options in ORACLES.values():
        method = get_method(name)
        assert options.items() <= method.resolve_options(options).items()
