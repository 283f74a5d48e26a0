"""Peak memory of the interference solver, from a count of its buffers.

In elements of float32, the usual compute dtype; a float64 matrix counts twice. Counted on top of the given deltas,
including the result, for the most expensive of the paths that the data may choose.

Shapes: `O` out_features, `I` in_features, `R` rows of one factor, `N = T R` rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.linalg.interference.moments import PrimalMoments
from actmat.linalg.interference.rereading import Second, second_reading
from actmat.linalg.interference.rule import Estimator, Rule
from actmat.linalg.interference.spectral_solve import PANEL_ROWS
from actmat.linalg.masks.threshold import selection_workspace

__all__ = ["workspace"]


def workspace(shape: Sequence[int], n_experts: int, rule: Rule, *, has_grams: bool = False) -> int:
    """Peak of `finish(prepare(...), consume=True)` for deltas `*batch O I`, in elements.

    Where deltas are read twice on the CPU and once elsewhere, the larger peak of both.
    """
    once = _read_once(shape, n_experts, rule, has_grams=has_grams)
    second = second_reading(rule, shape, n_experts, has_grams=has_grams)
    return once if second is None else max(once, _read_twice(shape, n_experts, rule, second))


def _read_twice(shape: Sequence[int], n_experts: int, rule: Rule, second: Second) -> int:
    rows, width = shape[-2:]
    square, panel = width * width, min(rows, PANEL_ROWS) * width * 2
    kept_grams = n_experts * square if second == "grams" else 0
    estimate = _estimate(rows, width, rule.estimator) + _scaled_copies(rows, width, rule.estimator)
    solving = square + _solving(rows, width, rule, panel)
    # the eigenvectors, with and without gains, or a gain that is formed; and the product of one expert
    inner = max(square, rows * width, rows * rows) if second == "deltas" else square
    applying = rows * width + 3 * square + max(inner, panel)
    return kept_grams + max(square + estimate, solving, applying)


def _read_once(shape: Sequence[int], n_experts: int, rule: Rule, *, has_grams: bool) -> int:
    rows, width = shape[-2:]
    batch = math.prod(shape[:-2])
    factor_rows = rule.estimator.rows(rows, width)
    form = rule.form(factor_rows, width, n_experts, has_grams=has_grams)
    fill = batch * rows * width if rule.needs_sum else 0
    panel = min(rows, PANEL_ROWS) * width * (3 if rule.needs_sum else 2)
    estimate = 0 if has_grams else _estimate(rows, width, rule.estimator) + _scaled_copies(rows, width, rule.estimator)
    if rule.null == "minus_base":  # the identity, eigenvectors of `S`, and the base in their coordinates and back
        panel += 3 * width * width + 2 * rows * width
    if form == "primal":
        held = fill + batch * (rows * width + width * width)
        needs_term = has_grams or PrimalMoments.needs_term(factor_rows, width)
        adding = estimate + (width * width if needs_term else rows * factor_rows)
        return held + max(adding, _solving(rows, width, rule, panel))
    stack = n_experts * factor_rows
    held = fill + batch * (stack * width + rows * stack)
    if form == "dual":
        held += batch * stack * stack
        return held + max(estimate, batch * rows * width + _solving(rows, stack, rule, panel))
    kept = min(stack, width)
    solved = kept * (rows + width)  # left and right of one item
    decomposing = stack * width + 2 * kept * (stack + width) + 4 * kept * kept
    finishing = batch * rows * width + panel
    return held + batch * solved + max(estimate, decomposing, finishing)


def _solving(rows: int, size: int, rule: Rule, panel: int) -> int:
    """Peak of one solve on top of its moments and its result."""
    square = size * size
    # LAPACK's divide and conquer in float64: input, vectors and 2 N^2 of work; afterwards only rounded vectors,
    # scaled vectors and their product
    spectrum = max(8 * square, 3 * square + panel)
    if rule.solver != "auto" or rule.spectral.kind not in ("hard", "tikhonov"):
        return spectrum
    # float64: the shifted copy and its factor; then the factor and either its inverse or panels of right-hand sides
    factorising = 4 * square
    if rows > size:
        return max(spectrum, factorising, 5 * square, square + panel)
    return max(spectrum, factorising, 2 * square + 5 * min(rows, PANEL_ROWS) * size + panel)


def _scaled_copies(rows: int, width: int, estimator: Estimator) -> int:
    """Copies of one delta that is far from 1: times the power of two of all experts, and of its own."""
    return rows * width * (2 if estimator.normalize == "norm" else 1)


def _estimate(rows: int, width: int, estimator: Estimator) -> int:
    """Peak of computing the factor of one delta, including the factor."""
    entries, peak = rows * width, 0
    if estimator.trim is not None:
        peak = 2 * entries + selection_workspace(entries)  # a contiguous copy and the result
    if estimator.centre:
        peak = max(peak, entries * (1 if estimator.trim is None else 2))
    if estimator.power != 1.0:
        small = min(rows, width)
        peak = max(peak, entries + small * (rows + 2 * width) + 4 * small * small)
    return peak
