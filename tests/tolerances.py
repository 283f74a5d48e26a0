"""The tolerances that tests share, with their reasons, and a limit for those that a test states by itself.

The named ones bound *relative Frobenius errors*, not single entries. A test whose construction fixes its own error (a
condition number, a number of samples, a file format) may state a number where it is used; if that number is looser
than `F64_ORACLE`, its file is in `OWN`, which holds how many there are and the loosest. tests/house/test_tolerances.py
compares: a test that misses its tolerance has found something, and nobody raises a number, here or there, to make it
pass without this file showing it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

F64_IDENTITY = 1e-12
"""An identity of exact arithmetic (a law of a method, low-rank = dense, one expert -> itself), computed in float64 on
well-conditioned input: eps = 2.2e-16, times a few thousand for the lengths of sums and for condition numbers to 1e3."""

F64_ORACLE = 1e-10
"""A float64 implementation against a naive float64 transcription that squares the deltas: with a condition number of
1e3 in the deltas, forming the Gram matrix amplifies eps by 1e6."""

F32_ELEMENTWISE = 1e-6
"""An elementwise rule in float32: each entry is a handful of roundings of 6e-8, and their average is smaller."""

F32_PRODUCT = 1e-5
"""A product of matrices, or an orthogonal change of basis, in float32: sums of up to some thousand terms."""

F32_SOLVE = 1e-4
"""A float32 solve with the default cut-off `I * eps(float32)` on well-conditioned deltas: the squared system keeps
half of the seven digits. Same cut-off on both sides; where eigenvalues straddle it, the answers may differ at will."""

F32_FORWARD = 1e-3
"""A forward pass of two layers in float32 whose weights agree to `F32_SOLVE`: every layer adds its own difference, and
norms and softmax pass a relative difference on at a small multiple."""

BF16_ROUNDING = 2.0**-8
"""One rounding to bfloat16 (8 bits of significand): at most half a unit in the last place, 2^-9 to 2^-8 relative."""

F16_ROUNDING = 2.0**-11
"""One rounding to float16 (11 bits of significand), for entries in its normal range."""

NAMES = tuple(name for name in list(globals()) if name.startswith(("F64", "F32", "BF16", "F16")))


def relative_error(out: Tensor, expected: Tensor) -> float:
    """`||out - expected||_F / ||expected||_F` in float64; the absolute norm where `expected` is exactly zero."""
    if out.shape != expected.shape:
        raise AssertionError(f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
    difference = torch.linalg.vector_norm(out.double() - expected.double()).item()
    size = torch.linalg.vector_norm(expected.double()).item()
    return difference / size if size else difference


LOOSEST = 0.02
"""Bare numbers above this are no tolerances of arithmetic: statistical bounds, effects that must be seen."""

_KEYWORDS = ("atol", "rtol", "rel", "abs")


def bare_tolerances(source: str) -> Iterator[float]:
    """Numbers looser than `F64_ORACLE` that a test compares with (`... < 1e-6`, `rel=1e-6`) without a name.

    >>> list(bare_tolerances("assert error(a, b) < 1e-6; assert x == approx(y, rel=1e-3); assert z < 1e-12"))
    [1e-06, 0.001]
    """
    for node in ast.walk(ast.parse(source)):
        value: ast.expr | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt | ast.LtE):
            value = node.comparators[0]
        elif isinstance(node, ast.keyword) and node.arg in _KEYWORDS:
            value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, float) and F64_ORACLE < value.value <= LOOSEST:
            yield value.value


def own_tolerances(tests: Path) -> dict[str, tuple[int, float]]:
    """File of a test -> how many bare tolerances it has, and the loosest."""
    found = {}
    for path in sorted(tests.rglob("test_*.py")):
        if numbers := list(bare_tolerances(path.read_text(encoding="utf-8"))):
            found[path.relative_to(tests).as_posix()] = (len(numbers), max(numbers))
    return found


OWN: dict[str, tuple[int, float]] = {
    "methods/test_ssr.py": (1, 1e-09),  # two solves of one system, one of them in a basis of its rows
    "recipe/test_mergekit_outputs.py": (1, 0.02),
    "adapters/test_adapter_options.py": (2, 0.0001),
    "adapters/test_adapter_outputs_agree.py": (1, 1e-09),
    "adapters/test_adapter_to_adapter.py": (5, 1e-09),
    "adapters/test_adapter_to_model.py": (1, 1e-08),
    "adapters/test_extract.py": (11, 1e-05),
    "adapters/test_lora_files.py": (6, 1e-06),
    "checkpoints/test_gguf.py": (1, 0.01),
    "demo/test_run.py": (5, 0.001),
    "diagnostics/test_diagnose.py": (5, 0.0001),
    "diagnostics/test_measures.py": (2, 0.01),
    "engine/test_execution.py": (2, 1e-06),
    "engine/test_size.py": (6, 0.0001),  # norms in records have six digits; float32 against float64
    "layout/test_packed_projections.py": (8, 0.01),
    "linalg/interference/test_cholesky.py": (1, 1e-06),
    "linalg/interference/test_estimators.py": (2, 0.01),
    "linalg/interference/test_filters.py": (2, 1e-05),
    "linalg/interference/test_sizes.py": (2, 0.001),
    "linalg/interference/test_solver.py": (6, 0.001),
    "linalg/masks/test_election.py": (1, 1e-06),
    "linalg/masks/test_masks.py": (1, 1e-06),
    "linalg/test_chunks.py": (2, 1e-06),
    "linalg/test_polar.py": (1, 1e-09),
    "linalg/test_products.py": (6, 1e-06),
    "linalg/test_svd.py": (5, 1e-06),
    "methods/test_actmat.py": (2, 1e-08),
    "methods/test_actmat_ridge.py": (2, 1e-06),
    "methods/test_aswudi.py": (1, 1e-09),
    "methods/test_cat.py": (1, 1e-09),
    "methods/test_conformance.py": (1, 0.0001),
    "methods/test_conformance_lowrank.py": (1, 1e-06),
    "methods/test_iso_cts.py": (1, 1e-05),
    "methods/test_karcher.py": (1, 1e-09),
    "methods/test_knots.py": (2, 1e-06),
    "methods/test_regmean.py": (4, 1e-05),
    "methods/test_swudi.py": (2, 0.0001),
    "methods/test_wudi.py": (1, 1e-09),
    "statistics/test_agreement_of_output.py": (3, 0.01),
    "statistics/test_residual_on_data.py": (4, 0.001),
    "tune/test_answers.py": (4, 0.0001),
    "tune/test_clip.py": (3, 0.001),
    "tune/test_memory.py": (1, 1e-06),
    "tune/test_tune.py": (4, 0.005),
    "e2e/test_python_inputs.py": (1, 0.001),
    "linalg/test_lowrank.py": (2, 0.001),
}
"""File -> number of bare tolerances above `F64_ORACLE`, and the loosest; each has its reason where it stands."""
