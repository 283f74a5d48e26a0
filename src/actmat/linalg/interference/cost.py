"""Cost of the interference solver, from shapes: its peak memory, and roughly its products.

Memory is in elements of float32, the usual compute dtype; a float64 matrix counts twice. Counted on top of the given
deltas, including the result, for the most expensive of the paths that the data may choose.

Shapes: `O` out_features, `I` in_features, `R` rows of one factor, `N` side of the reduced problem, `T R` rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.linalg.interference.descent import Adam
from actmat.linalg.interference.moments import PrimalMoments
from actmat.linalg.interference.rule import Estimator, InterferenceRule
from actmat.linalg.interference.spectral_solve import PANEL_ROWS
from actmat.linalg.masks.threshold import selection_workspace


def workspace(shape: Sequence[int], n_experts: int, rule: InterferenceRule | Adam, *, has_grams: bool = False) -> int:
    """Peak of `finish(prepare(...), consume=True)`, or of a descent, for deltas `*batch O I`, in elements."""
    if isinstance(rule, Adam):
        return _descent_workspace(shape)
    rows, width = shape[-2:]
    batch = math.prod(shape[:-2])
    factor_rows = rule.estimator.rows(rows, width)
    form = rule.form(factor_rows, width, n_experts, has_grams=has_grams)
    fill = batch * rows * width if rule.needs_sum else 0
    panel = min(rows, PANEL_ROWS) * width * (3 if rule.needs_sum else 2)
    copies = 2 if rule.estimator.normalize == "norm" else 1  # of a delta far from 1: times powers of two
    estimate = 0 if has_grams else _estimate(rows, width, rule.estimator) + rows * width * copies
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
    rank = min(stack, width)
    solved = rank * (rows + width)  # left and right of one item
    decomposing = stack * width + 2 * rank * (stack + width) + 4 * rank * rank
    finishing = batch * rows * width + panel
    return held + batch * solved + max(estimate, decomposing, finishing)


def _solving(rows: int, size: int, rule: InterferenceRule, panel: int) -> int:
    """Peak of one solve on top of its moments and its result."""
    square = size * size
    # LAPACK's divide and conquer in float64: input, vectors, values and 2 N^2 + 6 N of work with 5 N whole numbers;
    # afterwards only rounded vectors, scaled vectors and their product
    spectrum = max(8 * square + 24 * size, 3 * square + panel)
    if rule.solver != "auto" or rule.spectral.kind not in ("hard", "tikhonov"):
        return spectrum
    # float64: the shifted copy and its factor; then the factor and either its inverse or panels of right-hand sides
    factorizing = 4 * square
    if rows > size:
        return max(spectrum, factorizing, 5 * square, square + panel)
    return max(spectrum, factorizing, 2 * square + 5 * min(rows, PANEL_ROWS) * size + panel)


def _estimate(rows: int, width: int, estimator: Estimator) -> int:
    """Peak of computing the factor of one delta, including the factor."""
    entries, peak = rows * width, 0
    if estimator.trim is not None:
        peak = 2 * entries + selection_workspace(entries)  # a contiguous copy and the result
    if estimator.center:
        peak = max(peak, entries * (1 if estimator.trim is None else 2))
    if estimator.power != 1.0:
        small = min(rows, width)
        peak = max(peak, entries + small * (rows + 2 * width) + 4 * small * small)
    return peak


def _descent_workspace(shape: Sequence[int]) -> int:
    """Elements that `accumulate` and `descend` hold at their peak, including the result."""
    # per batch item: sum, S, residual, result; in work: a term of S and a delta that is brought near 1, or step, two
    # moments, gradient, root
    entries, square = math.prod(shape[-2:]), shape[-1] ** 2
    batch = math.prod(shape[:-2])
    return batch * (2 * entries + square) + max(square + entries, (batch + 5) * entries)


def side(shape: Sequence[int], n_experts: int, rule: InterferenceRule | Adam, *, has_grams: bool = False) -> int:
    """Side `N` of the matrix whose spectrum is computed; 0 for a ridge, which is solved, and for a descent."""
    if isinstance(rule, Adam) or _is_solved(rule):
        return 0
    rows, width = shape[-2:]
    return width if has_grams else min(width, n_experts * rule.estimator.rows(rows, width))


def products(rule: InterferenceRule | Adam) -> tuple[float, float]:
    """Products with a matrix of side `N` per expert, for the sums, and once, for a solve, a spectrum or a descent."""
    if isinstance(rule, Adam):
        return 3, rule.steps
    return 1.3, 2 if _is_solved(rule) else 3


def _is_solved(rule: InterferenceRule) -> bool:
    return rule.solver == "auto" and rule.spectral.kind == "tikhonov"
