"""Cost of the interference solver, from shapes: its peak memory, and its operations by class.

Memory is in elements of float32, the usual compute dtype; a float64 matrix counts twice. Counted on top of the given
deltas, including the result, for the most expensive of the paths that the data may choose.

Operations are counted as `linalg.operations` counts them, for the usual path: the cut-off removes something, so that
the spectrum is computed after a first factorization has failed to prove the contrary, and half of the directions are
kept.

Shapes: `O` out_features, `I` in_features, `R` rows of one factor, `N` side of the reduced problem, `T R` rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.linalg.gram import PANELLED_FROM
from actmat.linalg.interference.descent import Adam
from actmat.linalg.interference.moments import PrimalMoments
from actmat.linalg.interference.rule import Estimator, InterferenceRule
from actmat.linalg.interference.spectral_solve import PANEL_ROWS
from actmat.linalg.masks.threshold import selection_workspace
from actmat.linalg.operations import Operation, cholesky, cholesky_solve, eigh, entries, gram, product, repeated, svd

KEPT_SHARE = 0.5
"""Share of the directions that a cut-off is taken to keep; real deltas of language models keep 0.1 to 0.7."""


def workspace(shape: Sequence[int], n_experts: int, rule: InterferenceRule, *, has_grams: bool = False) -> int:
    """Peak of `finish(prepare(...), consume=True)` for deltas `*batch O I`, in elements."""
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
    kept = min(stack, width)
    solved = kept * (rows + width)  # left and right of one item
    decomposing = stack * width + 2 * kept * (stack + width) + 4 * kept * kept
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


def descent_workspace(shape: Sequence[int]) -> int:
    """Elements that `accumulate` and `descend` hold at their peak, including the result."""
    # per batch item: sum, S, residual, result; in work: a term of S and a delta that is brought near 1, or step, two
    # moments, gradient, root
    entries, square = math.prod(shape[-2:]), shape[-1] ** 2
    batch = math.prod(shape[:-2])
    return batch * (2 * entries + square) + max(square + entries, (batch + 5) * entries)


def operations(shape: Sequence[int], n_experts: int, rule: InterferenceRule, *, has_grams: bool) -> list[Operation]:
    """Operations of `finish(prepare(...))` for deltas `O I`."""
    rows, width = shape
    factor_rows = rule.estimator.rows(rows, width)
    form = rule.form(factor_rows, width, n_experts, has_grams=has_grams)
    added = _estimating(rows, width, rule, has_grams=has_grams)
    if form == "primal":
        if has_grams:
            added += [product(rows, width, width), entries(3 * width**2)]
        elif PrimalMoments.needs_term(factor_rows, width):
            added += [gram(factor_rows, width), product(rows, width, width), entries(4 * width**2)]
        else:
            by_factor = product(rows, width, factor_rows)
            symmetric = rule.estimator.is_delta
            added += [gram(factor_rows, width), gram(width, rows) if symmetric else by_factor, by_factor]
        done, size = repeated(added, n_experts), width
    else:
        size = n_experts * factor_rows
        added.append(entries(factor_rows * width))
        if form == "stacked" or size < PANELLED_FROM or not rule.estimator.is_delta:  # else a block of the Gram matrix
            added.append(product(rows, factor_rows, width))
        done = repeated(added, n_experts)
        if form == "stacked":
            kept = min(size, width)
            left = [svd(size, width), product(rows, kept, size), product(rows, width, kept)]
            if rule.null != "zero":
                left.append(product(rows, kept, width))
            return [*done, *left, entries(rows * width)]
        done.append(gram(width, size))
    done += _solved(rows, size, rule)
    if rule.null != "zero":
        done.append(product(rows, size, width))
    if form == "dual":
        done.append(product(rows, width, size))
    return [*done, entries(3 * rows * width)]


def descent_operations(shape: Sequence[int], n_experts: int, adam: Adam) -> list[Operation]:
    """Operations of `descend(accumulate(...))`: three products per expert, one and ten passes per step."""
    rows, width = shape
    sums = [product(width, width, rows), *repeated([product(rows, width, width)], 2), entries(4 * rows * width)]
    step = [product(rows, width, width), entries(10 * rows * width)]
    return [*repeated(sums, n_experts), *repeated(step, adam.steps)]


def _estimating(rows: int, width: int, rule: InterferenceRule, *, has_grams: bool) -> list[Operation]:
    """The norm of one delta, its factor, and its part of the fill."""
    passes = 2 + (1 if rule.needs_sum else 0)
    found: list[Operation] = []
    if not has_grams:
        passes += (8 if rule.estimator.trim is not None else 0) + (2 if rule.estimator.center else 0)
        if rule.estimator.power != 1.0:
            found.append(svd(rows, width))
    return [entries(passes * rows * width), *found]


def _solved(rows: int, size: int, rule: InterferenceRule) -> list[Operation]:
    """One reduced problem, by triangular factors or by its spectrum, and its gain applied to all rows."""
    if rule.solver == "auto" and rule.spectral.kind == "tikhonov":
        if rows > size:
            return [cholesky(size, inverse=True), product(rows, size, size)]
        return [cholesky(size), cholesky_solve(size, rows)]
    tried = [cholesky(size)] if rule.solver == "auto" and rule.spectral.kind == "hard" else []
    kept = size if rule.spectral.kind in ("tikhonov", "exponential") else max(1, int(KEPT_SHARE * size))
    applied = Operation("product", 2 * min(size * size * (kept + rows), 2 * rows * size * kept))
    return [*tried, eigh(size), entries(4 * size * size), applied]
