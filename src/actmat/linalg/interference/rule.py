"""One member of the interference family as a value: estimator, filter, fill and solver.

Shapes: `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from actmat.linalg.interference.estimators import Estimator
from actmat.linalg.interference.filters import Filter
from actmat.linalg.interference.moments import Form, form_for

__all__ = ["ZERO_MEAN", "Fill", "Null", "Rule", "Solver", "weights_problem"]

ZERO_MEAN = "null='mean' divides by the sum of the weights, which is zero; give a positive weight"

Null = Literal["zero", "sum", "mean"]
"""The fill `N` as an option: nothing (the base weights stay), `sum_t v_t D_t`, or `sum_t v_t D_t / sum_t v_t`,
`v_t` the user's weights."""

Fill = Literal["zero", "sum", "mean", "minus_base"]
"""`Null`, or `N = -W_0`, which solves for the weights `W_0 + D_t` in place of the deltas."""

Solver = Literal["auto", "eigh", "stacked", "dual"]
"""auto: the cheapest; eigh: of `S`, always; dual: of `A A^T`; stacked: SVD of the stacked factors `A`, never squared.

On steep spectra in float32, stacked is the most accurate, and dual the least where the rows of `A` are dependent:
choose dual only where all rows together are fewer than `I`, as auto does."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One member of the family.

    Args:
        estimator: how `w_t K_t` is computed from `D_t`; unused where Gram matrices are given.
        spectral: the filter `f`.
        null: the fill `N`.
        solver: the exact form to use.
        off_diagonal: factor on the off-diagonal entries of given Gram matrices.
        per_trace: divide each given Gram matrix by its trace.
        bounded: scale each merged matrix down to `||N||_F` where it is longer; for `null` other than "zero".

    >>> Rule(null="mean").needs_sum, Rule().needs_sum
    (True, False)
    """

    estimator: Estimator = field(default_factory=Estimator)
    spectral: Filter = field(default_factory=Filter)
    null: Fill = "zero"
    solver: Solver = "auto"
    off_diagonal: float = 1.0
    per_trace: bool = False
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.bounded and self.null == "zero":
            raise ValueError("a bounded rule needs a fill to be bounded by: null='sum' or 'mean', not 'zero'")

    @property
    def needs_sum(self) -> bool:
        """True if the fill is computed from `sum_t v_t D_t`."""
        return self.null in ("sum", "mean")

    def moments_key(self) -> Hashable:
        """Value on which the accumulated sums depend: rules with equal keys can share them."""
        return ("interference", self.estimator, self.needs_sum, self.solver, self.off_diagonal, self.per_trace)

    def weights_problem(self, weights: Sequence[float] | None) -> str | None:
        """Why these weights cannot be used with this rule, or None."""
        problem = None if weights is None else weights_problem(weights)
        if problem is None and weights is not None and self.null == "mean" and sum(weights) == 0:
            return ZERO_MEAN
        return problem

    def gram_weight(self, gram_II: Tensor) -> float:
        """The normaliser of a given Gram matrix."""
        if not self.per_trace:
            return 1.0
        trace = float(gram_II.diagonal().double().sum())
        return 1.0 / trace if trace > 0 else 0.0

    def form(self, factor_rows: int, width: int, n_experts: int, *, has_grams: bool = False) -> Form:
        """The form used for `n_experts` factors of `factor_rows x width`."""
        if has_grams or self.solver == "eigh":
            return "primal"
        if self.solver == "auto":
            return form_for(factor_rows, n_experts, width)
        return self.solver


def weights_problem(weights: Sequence[float]) -> str | None:
    """Why these weights cannot be used by any member of the family, or None.

    >>> weights_problem([1.0, 0.0]) is None, weights_problem([1.0, -1.0]) is None
    (True, False)
    """
    if bad := [float(w) for w in weights if not (math.isfinite(w) and w >= 0)]:
        return f"the interference family needs finite weights >= 0 (they weight semidefinite matrices), found {bad}"
    return None
