"""Operations of the interference solver, counted as `linalg.operations` counts them.

Which path a solve takes depends on the data. Counted is the usual one: the cut-off removes something, so that the
spectrum is computed after a first factorisation has failed to prove the contrary, and half of the directions are kept.

Shapes: `O` out_features, `I` in_features, `R` rows of one factor, `N` side of the reduced problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from actmat.linalg.interference.descent import Adam
from actmat.linalg.interference.gains import EigenPairs, Inverse
from actmat.linalg.interference.moments import PrimalMoments
from actmat.linalg.interference.rereading import Second, products, second_reading
from actmat.linalg.interference.rule import Rule
from actmat.linalg.operations import Operation, cholesky, cholesky_solve, eigh, entries, gram, product, repeated, svd

__all__ = ["KEPT_SHARE", "descent_operations", "operations"]

KEPT_SHARE = 0.5
"""Share of the directions that a cut-off is taken to keep; real deltas of language models keep 0.1 to 0.7."""


def operations(shape: Sequence[int], n_experts: int, rule: Rule, *, has_grams: bool, double: bool) -> list[Operation]:
    """Operations of `finish(prepare(...))` for deltas `*batch O I`.

    Args:
        double: the deltas are float64.
    """
    rows, width = shape[-2:]
    factor_rows = rule.estimator.rows(rows, width)
    if second := second_reading(rule, shape, n_experts, has_grams=has_grams):
        return _read_twice((rows, width), n_experts, rule, second)
    form = rule.form(factor_rows, width, n_experts, has_grams=has_grams)
    added = _estimate(rows, width, rule, has_grams=has_grams)
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
        added += [product(rows, factor_rows, width), entries(factor_rows * width)]
        done = repeated(added, n_experts)
        if form == "stacked":
            kept = min(size, width)
            left = [svd(size, width, double=double), product(rows, kept, size), product(rows, width, kept)]
            if rule.null != "zero":
                left.append(product(rows, kept, width))
            return repeated([*done, *left, entries(rows * width)], math.prod(shape[:-2]))
        done.append(gram(width, size))
    done += _solving(rows, size, rule)
    if rule.null != "zero":
        done.append(product(rows, size, width))
    if form == "dual":
        done.append(product(rows, width, size))
    done.append(entries(3 * rows * width))
    return repeated(done, math.prod(shape[:-2]))


def _read_twice(shape: tuple[int, int], n_experts: int, rule: Rule, second: Second) -> list[Operation]:
    """Two readings of one matrix: the sum of the Gram matrices, one problem, and the products with its gain."""
    rows, width = shape
    first = [*_estimate(rows, width, rule, has_grams=False), gram(rule.estimator.rows(rows, width), width)]
    solved, gain = _found(width, rule)
    by_way = products(second, shape, n_experts, gain)
    again = Operation("product", 2 * min(by_way.values()))
    passes = entries((4 * width * width if second == "grams" else 0) + rows * width)
    return [*repeated([*first, passes], n_experts), *solved, again, entries(4 * rows * width)]


def descent_operations(shape: Sequence[int], n_experts: int, adam: Adam) -> list[Operation]:
    """Operations of `descend(accumulate(...))`: three products per expert, one and ten passes per step."""
    rows, width = shape[-2:]
    sums = [product(width, width, rows), *repeated([product(rows, width, width)], 2), entries(4 * rows * width)]
    step = [product(rows, width, width), entries(10 * rows * width)]
    return repeated([*repeated(sums, n_experts), *repeated(step, adam.steps)], math.prod(shape[:-2]))


def _estimate(rows: int, width: int, rule: Rule, *, has_grams: bool) -> list[Operation]:
    """The norm of one delta, its factor, and its part of the fill."""
    passes = 2 + (1 if rule.needs_sum else 0)
    found: list[Operation] = []
    if not has_grams:
        passes += (8 if rule.estimator.trim is not None else 0) + (2 if rule.estimator.centre else 0)
        if rule.estimator.power != 1.0:
            found.append(svd(rows, width))
    return [entries(passes * rows * width), *found]


def _solving(rows: int, size: int, rule: Rule) -> list[Operation]:
    """One reduced problem, by triangular factors or by its spectrum."""
    solved, gain = _found(size, rule)
    if isinstance(gain, Inverse):
        if rows > size:
            return [*solved, product(rows, size, size)]
        return [cholesky(size), cholesky_solve(size, rows)]
    kept = gain.vectors_NK.shape[1]
    if size * size * kept + rows * size * size < 2 * rows * size * kept:
        return [*solved, product(size, size, kept), product(rows, size, size)]
    return [*solved, *repeated([product(rows, kept, size)], 2)]


def _found(size: int, rule: Rule) -> tuple[list[Operation], Inverse | EigenPairs]:
    """Operations that find the gain of one reduced problem, and a gain of its size that holds no data."""
    if rule.solver == "auto" and rule.spectral.kind == "tikhonov":
        return [cholesky(size, inverse=True)], Inverse(torch.empty(size, size, device="meta"), torch.float32)
    tried = [cholesky(size)] if rule.solver == "auto" and rule.spectral.kind == "hard" else []
    kept = size if rule.spectral.kind in ("tikhonov", "exponential") else max(1, int(KEPT_SHARE * size))
    vectors_NK = torch.empty(size, kept, device="meta")
    return [*tried, eigh(size), entries(4 * size * size)], EigenPairs(vectors_NK, vectors_NK)
