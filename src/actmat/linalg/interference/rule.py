"""One member of the interference family as a value (`InterferenceRule`): estimator, filter, fill and solver.

An estimate of a layer's input second moment is stored as a factor, `K_t = A_t^T A_t`, so that the squared matrix need
not be formed. With `S = V diag(l) V^T`, a filter gives `f(l)` in [0, 1]; the solver needs the gain `g = f(l) / l`.

Shapes: `O` out_features, `I` in_features, `R` rows of the factor (`R = O`, or `min(O, I)` for a power), `N` eigenvalues
(ascending), `K` of them kept (the largest).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.interference.moments import MomentForm
from actmat.linalg.lapack import Retries, economy_svd
from actmat.linalg.masks.mask import trim_to_top

ZERO_MEAN = "null='mean' divides by the sum of the weights, which is zero; give a positive weight"

FLOAT32_EPS = 2.0**-23
"""eps of float32: the unit of the default cut-off, whatever the compute dtype."""

FilterKind = Literal["hard", "tikhonov", "exponential", "adaptive"]
Normalizer = Literal["none", "norm"]

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
class Estimator:
    """The estimate `w_t K_t` of one delta `D_t`; the steps apply in this order."""

    trim: float | None = None  # keep this fraction of the entries, those of largest magnitude (TACT)
    center: bool = False  # subtract from each row the mean row (over `O`), as ACE does
    power: float = 1.0  # `K_t = (A^T A)^power` in place of `A^T A`
    normalize: Normalizer = "none"  # "norm": `1 / ||D_t||_F^2` of the full delta (WUDI), 0 for a zero delta

    @property
    def degree(self) -> float:
        """Power with which `w_t K_t` grows with the delta: 2 as it is, 0 with the normalizer."""
        return 2 * self.power - (2 if self.normalize == "norm" else 0)

    def rows(self, out_features: int, in_features: int) -> int:
        """Rows `R` of the factor of an `O x I` delta."""
        return out_features if self.power == 1.0 else min(out_features, in_features)

    def factor(self, delta_OI: Tensor) -> tuple[Tensor, Retries]:
        """`A_t` with `K_t = A_t^T A_t`, and the retries of its decomposition; maybe the delta itself."""
        out = delta_OI if self.trim is None else trim_to_top(delta_OI, self.trim)
        if self.center:
            out = out - out.mean(dim=-2, keepdim=True)
        return self.powered(out)

    def powered(self, factor_OI: Tensor) -> tuple[Tensor, Retries]:
        """`diag(s^power) V^T` for the factor `U diag(s) V^T`: its Gram is the power of the factor's Gram.

        By SVD, not through the Gram's eigenvalues: those carry an error `eps s_max^2`, whose root is `3e-4 s_max`
        in float32.
        """
        if self.power == 1.0:
            return factor_OI, ()
        svd = economy_svd(factor_OI)
        return svd.s_R.pow(self.power).unsqueeze(-1) * svd.vh_RN, svd.retries

    def weight(self, squared_norm: float) -> float:
        """The normalizer `w_t` of a delta with this squared Frobenius norm."""
        if self.normalize == "none":
            return 1.0
        return 1.0 / squared_norm if squared_norm > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter and its parameter.

    hard         f = 1 where l > rtol l_max, else 0
    tikhonov     f = l / (l + ridge m), m = tr(S) / I the mean eigenvalue
    exponential  f = 1 - exp(-l t): gradient flow stopped at time t
    adaptive     hard, and at most the `ceil((sum sqrt(l))^2 / sum(l))` largest
    """

    kind: FilterKind = "hard"
    rtol: float | None = None  # relative cut-off in units of the eigenvalues of `S`; None means `I eps(float32)`
    ridge: float = 0.1  # in units of the mean eigenvalue
    time: float = 10.0  # in units of 1 / m
    time_is_absolute: bool = False  # in units of 1: eigenvalues of a normalized `S` have a scale

    def resolved_rtol(self, size: int, width: int, dtype: torch.dtype) -> float:
        """The relative cut-off in force for an `N x N` matrix (`size`) of a layer with `I = width` inputs.

        Never below the rounding of the matrix itself, `min(N, I) eps(dtype)`: below that, eigenvalues are noise.
        """
        wanted = width * FLOAT32_EPS if self.rtol is None else self.rtol
        return max(wanted, min(size, width) * torch.finfo(dtype).eps)


def gain(values_N: Tensor, spectral: Filter, *, rtol: float, mean: float) -> tuple[Tensor, dict[str, float | int]]:
    """`g = f(l) / l` of the `K` largest eigenvalues (the others have none), and the filter's record.

    Args:
        values_N: eigenvalues, ascending; rounding may have made the smallest negative.
        rtol: relative cut-off in force, see `Filter.resolved_rtol`.
        mean: mean eigenvalue of `S`, `tr(S) / I`.
    """
    if spectral.kind == "tikhonov":
        ridge = spectral.ridge * mean
        return 1.0 / (values_N.clamp_min(0) + ridge), {"ridge": ridge}
    if spectral.kind == "exponential":
        time = spectral.time if spectral.time_is_absolute else spectral.time / mean
        exponent = values_N.clamp_min(0) * time
        # (1 - exp(-l t)) / l -> t as l -> 0
        ratio = -torch.expm1(-exponent) / exponent.clamp_min(torch.finfo(exponent.dtype).tiny)
        return torch.where(exponent > 0, ratio, 1.0) * time, {"time": time}
    cutoff = rtol * float(values_N[-1])
    rank = int((values_N > cutoff).sum())
    if spectral.kind == "adaptive" and rank:
        positive = values_N[values_N.numel() - rank :].double()
        participation = float(positive.sqrt().sum() ** 2 / positive.sum())
        # minus one part in 1e9 before the ceiling: equal eigenvalues give an integer, up to rounding
        rank = min(rank, math.ceil(participation * (1 - 1e-9)))
    return 1.0 / values_N[values_N.numel() - rank :], {"rank": rank, "cutoff": cutoff, "rtol": rtol}


@dataclass(frozen=True, slots=True)
class InterferenceRule:
    """One member of the family."""

    estimator: Estimator = field(default_factory=Estimator)  # unused where Gram matrices are given
    spectral: Filter = field(default_factory=Filter)
    null: Fill = "zero"
    solver: Solver = "auto"
    off_diagonal: float = 1.0  # factor on the off-diagonal entries of given Gram matrices
    per_trace: bool = False  # divide each given Gram matrix by its trace
    prior: float = 0.0  # share of `D^T D`, of the trace of the given Gram matrix, that is added to it

    def __post_init__(self) -> None:
        if self.null == "minus_base" and self.spectral.kind not in ("hard", "adaptive"):
            raise ValueError(
                "form='weight' takes the base out of directions that are cut off, and nothing is cut here. "
                "Fix: no ridge, filter='hard' or 'adaptive', or form='delta'"
            )

    @property
    def needs_sum(self) -> bool:
        """True if the fill is computed from `sum_t v_t D_t`."""
        return self.null in ("sum", "mean")

    def moments_key(self) -> Hashable:
        """Value on which the accumulated sums depend: rules with equal keys can share them."""
        return replace(self, spectral=Filter(), null="sum" if self.needs_sum else "zero")

    def weights_problem(self, weights: Sequence[float] | None) -> str | None:
        """Why these weights cannot be used with this rule, or None."""
        if weights is None:
            return None
        return weights_problem(weights) or (ZERO_MEAN if self.null == "mean" and sum(weights) == 0 else None)

    def gram_weight(self, trace: float) -> float:
        """The normalizer of a given Gram matrix with this trace; of a zero matrix it does not matter."""
        return 1.0 / trace if self.per_trace and trace > 0 else 1.0

    def form(self, factor_rows: int, width: int, n_experts: int, *, has_grams: bool = False) -> MomentForm:
        """The form used for `n_experts` factors of `factor_rows x width`."""
        if has_grams or self.solver == "eigh":
            return "primal"
        if self.solver != "auto":
            return self.solver
        return "dual" if factor_rows * n_experts < width else "primal"  # fewer rows of all factors than columns


def weights_problem(weights: Sequence[float]) -> str | None:
    """Why these weights cannot be used by any member of the family, or None."""
    if refused := [float(w) for w in weights if not (math.isfinite(w) and w >= 0)]:
        listed = ", ".join(f"{w:g}" for w in refused)
        return f"the interference family needs finite weights >= 0 (they weight semidefinite matrices), found {listed}"
    return None
