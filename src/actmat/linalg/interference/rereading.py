"""`sum_t w_t D_t K_t G` from the deltas themselves, which are read a second time when the gain `G` is known.

    factors      (sum_t w_t D_t (K_t V g)) V^T      with the kept eigenvectors `V` only
    grams        sum_t w_t D_t (K_t G)
    numerator    (sum_t w_t D_t K_t) G

The first reading accumulates only `S`. `numerator` makes the products that accumulating `B` in the first reading would
have made; the others make fewer where directions are cut off, or where a matrix is tall. Which way is taken follows
from the sizes and from the number of directions that are kept.

A square or tall matrix keeps every `K_t` from the first reading, where these take little more memory than `B`. Of a
wide one the delta itself gives both factors, `K_t X = D_t^T (D_t X)` or `D_t K_t X = (D_t D_t^T) (D_t X)`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rows of one factor, `K` kept directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from actmat.linalg.interference.moments import PrimalMoments, Reduced, gram_of_rows
from actmat.linalg.interference.rule import Rule
from actmat.linalg.interference.spectral_solve import EigenPairs, Gain, apply_in_panels
from actmat.linalg.operations import gram
from actmat.linalg.panels import add_gram, mirror, multiply
from actmat.linalg.scaling import scaled

Second = Literal["grams", "deltas"]
"""Source of `K_t` in the second reading: those kept from the first, or the delta."""

Way = Literal["factors", "grams", "numerator"]

SMALLEST = 2048
"""In_features below which `B` is accumulated at once: the cost of a second reading grows with the entries of a delta,
what it spares with these times the in_features. At 2048 it costs some 2 % where nothing is spared
(`benchmarks/rereading.py`)."""

SQUARES = 3
"""Matrices of `I x I` that all `K_t` may take beyond the numerator that one reading holds: beside the eight of a
decomposition, up to three tenths more memory for a square matrix."""


def second_reading(rule: Rule, shape: Sequence[int], n_experts: int, *, has_grams: bool = False) -> Second | None:
    """Source of `K_t` in the second reading of deltas `*batch O I`; None: they are read once.

    Args:
        has_grams: Gram matrices are given.
    """
    rows, width = shape[-2:]
    factor_rows = rule.estimator.rows(rows, width)
    if has_grams or rule.solver != "auto" or rule.null != "zero" or width < SMALLEST or math.prod(shape[:-2]) != 1:
        return None
    if rule.form(factor_rows, width, n_experts) != "primal":
        return None
    cuts = rule.spectral.kind in ("hard", "adaptive")  # else every direction is kept, which pays in very tall matrices
    if PrimalMoments.needs_term(factor_rows, width):
        return "grams" if (n_experts - SQUARES if cuts else n_experts) * width <= rows else None
    return "deltas" if cuts and rule.estimator.is_delta and rule.estimator.normalize == "none" else None


def products(second: Second, shape: Sequence[int], n_experts: int, gain: Gain) -> dict[Way, int]:
    """Multiplications of one entry by another in the second reading of deltas `O I`, by way."""
    rows, width = shape[-2:]
    found: dict[Way, int] = {}
    if isinstance(gain, EigenPairs):
        kept = gain.vectors_NK.shape[1]
        own = width * width * kept if second == "grams" else _products_by_delta(rows, width, kept)[0]
        found["factors"] = n_experts * (rows * width * kept + own) + rows * width * kept
    if second == "grams":
        found["grams"] = gain.products(n_experts * width) + n_experts * rows * width * width
        target = rows * width * width
    else:
        target = gram(width, rows).flops // 2 + rows * rows * width
    found["numerator"] = n_experts * target + gain.products(rows)
    return found


def _products_by_delta(rows: int, width: int, kept: int) -> tuple[int, bool]:
    """Multiplications for `D_t D_t^T X_OK`, and whether `D_t D_t^T` is formed for them."""
    formed, factored = gram(width, rows).flops // 2 + rows * rows * kept, 2 * rows * width * kept
    return min(formed, factored), formed < factored


class GramMoments:
    """Only `S`, accumulated in place, and the inputs of a second reading besides the gain.

    Args:
        second: source of `K_t` in the second reading.
        like: of the width `I`, dtype and device of a delta.
        deltas: for the second reading, `O I` each, or with batch axes of one item; each is asked for once more.
        unit: exponent of the power of two that they are multiplied by.
    """

    def __init__(self, second: Second, like: Tensor, deltas: Sequence[Tensor] = (), unit: int = 0) -> None:
        self._second = second
        self.deltas = deltas
        self.unit = unit
        self._gram_II = like.new_zeros(like.shape[-1], like.shape[-1])
        self._weights: list[float] = []
        self._grams: list[Tensor] = []

    def add(self, delta_OI: Tensor, factor_RI: Tensor, weight: float) -> None:
        """Add one expert with `K_t = A_t^T A_t`."""
        self._weights.append(weight)
        if self._second == "deltas":
            add_gram(self._gram_II, factor_RI, weight)
            return
        self._grams.append(gram_of_rows([factor_RI]))
        self._gram_II.add_(self._grams[-1], alpha=weight)

    def rescale(self, exponent: float, gram_exponent: float) -> None:
        """As `PrimalMoments.rescale`. A kept `K_t` stays, its weight changes; of the others the delta will."""
        scaled(self._gram_II, gram_exponent, out=self._gram_II)
        if self._second == "grams":
            self._weights = [w * 2.0**gram_exponent for w in self._weights]

    def reduced(self) -> Reduced:
        """The problem without its numerator; the accumulator must not be used afterwards."""
        if self._second == "deltas":
            mirror(self._gram_II)
        gram_II = self._gram_II
        del self._gram_II  # freed with the problem
        return Reduced(None, gram_II, None, "primal", len(gram_II), gram_II.dtype)

    def merged(self, gain: Gain, out_OI: Tensor, *, spent: bool) -> Way:
        """Write `sum_t w_t D_t K_t G` to `out_OI`; returns the way that was taken.

        Args:
            spent: nothing is merged by these moments afterwards: each `K_t` is freed when it has been used.
        """
        costs = products(self._second, out_OI.shape, len(self._weights), gain)
        way = min(costs, key=lambda w: costs[w])
        out_OI.zero_()
        if isinstance(gain, EigenPairs) and way == "factors":
            self._by_factors(gain, out_OI, spent=spent)
            return way
        by_gram = gain.applier(len(self._weights) * out_OI.shape[-1]) if way == "grams" else None
        for t, weight in enumerate(self._weights):
            delta_OI = self._delta(t)
            if self._second == "deltas":
                multiply(gram_of_rows([delta_OI.mT]), delta_OI, out_OI, alpha=weight)
            else:
                gram_II = self._taken_gram(t, spent=spent)
                multiply(delta_OI, gram_II if by_gram is None else by_gram(gram_II), out_OI, alpha=weight)
        if way == "numerator":
            apply = gain.applier(len(out_OI))
            apply_in_panels(lambda panel_XI, _: apply(panel_XI), out_OI, out_OI)
        return way

    def _by_factors(self, gain: EigenPairs, out_OI: Tensor, *, spent: bool) -> None:
        kept = gain.vectors_NK.shape[1]
        sum_OK = out_OI[:, :kept]  # the result takes its place, panel by panel
        _, forms_square = _products_by_delta(out_OI.shape[0], out_OI.shape[1], kept)
        for t, weight in enumerate(self._weights):
            delta_OI = self._delta(t)
            if self._second == "grams":
                right_IK = multiply(self._taken_gram(t, spent=spent), gain.scaled_NK)
                multiply(delta_OI, right_IK, sum_OK, alpha=weight)
                continue
            own_OK = multiply(delta_OI, gain.scaled_NK)
            if forms_square:
                multiply(gram_of_rows([delta_OI.mT]), own_OK, sum_OK, alpha=weight)
            else:
                multiply(delta_OI, multiply(delta_OI.mT, own_OK), sum_OK, alpha=weight)
        apply_in_panels(lambda panel_XK, _: panel_XK @ gain.vectors_NK.mT, sum_OK, out_OI)

    def _delta(self, t: int) -> Tensor:
        delta = self.deltas[t]
        return scaled(delta.view(delta.shape[-2:]), self.unit)

    def _taken_gram(self, t: int, *, spent: bool) -> Tensor:
        gram_II = self._grams[t]
        if spent:
            self._grams[t] = gram_II.new_empty(0)
        return gram_II
