"""ACE: ACTMat's solve on centred, and where experts differ in size normalised, covariance estimates.

B. Xu et al., "ACE-Merging: Data-Free Model Merging with Adaptive Covariance Estimation", 2026, arXiv:2603.02945.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions of the refinement, `P, Q` sides of the cores of
low-rank deltas, where the mean over the rows is the projection on one known direction of the `P` side.

Where the paper's formula and its public code differ, this is the code: the residual term takes the deltas without
centring, the variance over the experts is unbiased. Unlike the code, an expert without a spread over its rows (a zero
delta, or equal rows) is left out: the code divides by its trace, which is zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.errors import NumericalError
from actmat.linalg import operations as ops
from actmat.linalg.lapack import Retries
from actmat.linalg.lowrank import CommonBases, LowRank, common_bases
from actmat.linalg.svd import RANK_RTOL, Way, accuracy_of, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import OneMatrix, each_matrix, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import About, Cost, Merged

Gate = Literal["auto", "on", "off"]
TINY = 1e-12
"""Added by the published code to everything that it divides by."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Geometry that a core does not show: unit direction of equal rows, ones over the inputs, sides of the layer."""

    same_O: Tensor
    ones_I: Tensor
    n_in: int
    directions: int


def merge(
    deltas: Sequence[Tensor],
    frames: Iterable[_Frame] | None = None,
    *,
    eps: Annotated[float, Bounds(low=0, open_low=True)] = 1e-2,
    gate: Gate = "auto",
    threshold: Annotated[float, Bounds(low=0)] = 0.3,
    leading: Fraction = 0.3,
) -> Merged:
    """`D_0 = (sum_t A_t R_t) (sum_t R_t + 1 c)^-1`, and `D* = D_0 + mean(s_1..K) U_K V_K^T` where the gate is open.

    `A_t` is `D_t` less its mean row; `S_t = A_t^T A_t`, divided by its trace `r_t` where the gate is open;
    `R_t = S_t + e_t I`, `e_t = eps` (`eps / r_t` where it is open); `c = 1^T sum_t S_t / I`, divided by the mean
    `||D_t||^2` where it is open. `U, s, V` are those of `D_0 + sum_t D_t (S_t - sum_u R_u / T)`,
    `K = int(leading min(O, I))`. Directions that this matrix does not have stay unchanged.

    Args:
        eps: ridge, in units of the squared entries of the deltas: not invariant to their size.
        gate: "auto" opens it where `heterogeneity` exceeds the `threshold`; "on", "off" fix it.
        threshold: of the heterogeneity, above which experts count as different in size.
        leading: share of the singular directions that the refinement raises.
    """
    if frames is None:
        rows, columns = deltas[0].shape[-2:]
        ones_O, ones_I = (torch.ones(n, dtype=torch.float64, device=deltas[0].device) for n in (rows, columns))
        frames = itertools.repeat(_Frame(ones_O / math.sqrt(rows), ones_I, columns, min(rows, columns)))
    own, rule = iter(frames), partial(_merge, eps=eps, gate=gate, threshold=threshold, leading=leading)
    value, stats = each_matrix(lambda each: rule(each, frame=next(own)), deltas)
    return Merged(value.to(deltas[0].dtype), stats)


def _site(deltas: Sequence[LowRank]) -> tuple[CommonBases, Iterable[_Frame]]:
    """The common bases with the direction of equal rows among the columns, and the frame of each matrix in them."""
    *batch, rows, columns = deltas[0].shape
    ones_O1 = deltas[0].b_OR.new_ones((*batch, rows, 1))
    bases = common_bases([*deltas, LowRank(ones_O1, deltas[0].a_RI.new_zeros((*batch, 1, columns)))])
    same_P = (bases.p_OP.mT @ ones_O1).reshape(-1, bases.p_OP.shape[-1]) / math.sqrt(rows)
    ones_Q = bases.q_IQ.sum(-2).reshape(-1, bases.q_IQ.shape[-1])
    return bases, (_Frame(p, q, columns, min(rows, columns)) for p, q in zip(same_P, ones_Q, strict=True))


def heterogeneity(squares: Sequence[float]) -> float:
    """`Var_t(log ||D_t||^2) / mean_t(log ||D_t||^2)^2`, the variance unbiased; 0 for one expert.

    A common factor of all deltas moves the mean of the logarithms but not their variance, so that the same experts in
    another unit have another heterogeneity: it grows without bound where the mean is near 0.

    >>> round(heterogeneity([math.exp(2), math.exp(4)]), 3), round(heterogeneity([math.exp(-1), math.exp(1)])) > 1e6
    (0.222, True)
    """
    logs = [math.log(s) for s in squares]
    if len(logs) < 2:
        return 0.0
    mean = math.fsum(logs) / len(logs)
    return math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1) / (mean * mean + TINY)


def _merge(
    deltas: Sequence[Tensor], *, frame: _Frame, eps: float, gate: Gate, threshold: float, leading: float
) -> OneMatrix:
    """One matrix, in float64; `deltas` may be small cores."""
    norms = [_squares(delta, frame) for delta in deltas]
    used = [t for t, (raw, spread) in enumerate(norms) if spread > RANK_RTOL**2 * raw]
    gamma = heterogeneity([norms[t][0] for t in used])
    is_open = bool(used) and (gamma > threshold if gate == "auto" else gate == "on")
    numbers = {"heterogeneity_max": gamma, "gates_open": int(is_open), "left_out": len(deltas) - len(used)}
    if not used:
        return OneMatrix(torch.zeros_like(deltas[0], dtype=torch.float64), numbers)
    traces = [norms[t][1] + TINY if is_open else 1.0 for t in used]
    ridge = math.fsum(eps / trace for trace in traces)
    width = deltas[0].shape[-1]
    sum_II = torch.zeros((width, width), dtype=torch.float64, device=deltas[0].device)
    left_OI = torch.zeros_like(deltas[0], dtype=torch.float64)
    for t, trace in zip(used, traces, strict=True):
        centred_OI = _centred(deltas[t].double(), frame)
        scatter_II = (centred_OI.mT @ centred_OI) / trace
        sum_II += scatter_II
        left_OI += centred_OI @ scatter_II + centred_OI * (eps / trace)
    unit = frame.n_in * (math.fsum(norms[t][0] for t in used) / len(used) + TINY if is_open else 1.0)
    row_I = (frame.ones_I @ sum_II) / unit
    sum_II.diagonal().add_(ridge)
    value_OI = _solved(left_OI, sum_II, frame.ones_I, row_I)
    if not is_open:
        return OneMatrix(value_OI, numbers)
    refined_OI, retries, ways = _refinement(value_OI, [deltas[t] for t in used], traces, sum_II, frame, leading)
    return OneMatrix(value_OI + refined_OI, numbers, retries, ways)


def _squares(delta_OI: Tensor, frame: _Frame) -> tuple[float, float]:
    """`||D||^2` and `||A||^2` of the delta and its centred form."""
    wide_OI = delta_OI.double()
    return float(wide_OI.square().sum()), float(_centred(wide_OI, frame).square().sum())


def _centred(delta_OI: Tensor, frame: _Frame) -> Tensor:
    return delta_OI - torch.outer(frame.same_O, frame.same_O @ delta_OI)


def _solved(left_OI: Tensor, sum_II: Tensor, ones_I: Tensor, row_I: Tensor) -> Tensor:
    """`left (sum + 1 row)^-1` by Sherman and Morrison: `1 + row sum^-1 1` is at least 1, as both commute."""
    factor_II, info = torch.linalg.cholesky_ex(sum_II)
    if int(info) != 0:
        raise NumericalError(
            f"ace: the sum of the covariance estimates of {tuple(left_OI.shape)} is not positive definite in float64. "
            "Likely cause: eps is too small beside the deltas' squares. Fix: a larger eps (published: 1e-5 to 4e-2)."
        )
    both = torch.cholesky_solve(torch.cat([left_OI.mT, row_I.unsqueeze(-1)], dim=-1), factor_II).mT
    value_OI, row_I = both[:-1], both[-1]
    return value_OI - torch.outer(value_OI @ ones_I, row_I) / (1 + row_I @ ones_I)


def _refinement(
    value_OI: Tensor,
    deltas: Sequence[Tensor],
    traces: Sequence[float],
    sum_II: Tensor,
    frame: _Frame,
    leading: float,
) -> tuple[Tensor, Retries, Sequence[Way]]:
    """`mean(s_1..K) U_K V_K^T` of `D_0 + sum_t D_t (S_t - sum_u R_u / T)`."""
    kept = int(frame.directions * leading)
    if kept == 0:
        return torch.zeros_like(value_OI), (), ()
    target_OI = value_OI.clone()
    total_OI = torch.zeros_like(value_OI)
    for delta_OI, trace in zip(deltas, traces, strict=True):
        wide_OI = delta_OI.double()
        centred_OI = _centred(wide_OI, frame)
        target_OI += (wide_OI @ centred_OI.mT) @ centred_OI / trace
        total_OI += wide_OI
    target_OI -= total_OI @ sum_II / len(deltas)
    svd = thin_svd(target_OI, k=kept, accuracy=accuracy_of(deltas[0]))
    return (float(svd.s_K.sum()) / kept) * (svd.u_OK @ svd.v_IK.mT), svd.retries, (svd.way,)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    # In float64, two elements each: the sum, a scatter and its factor; a delta, its centred form and their products.
    one = 2 * (4 * columns * columns + 7 * rows * columns)
    if options["gate"] != "off":
        one = max(one, 2 * (columns * columns + 4 * rows * columns) + 2 * svd_workspace(rows, columns))
    return one + 2 * math.prod(batch) * rows * columns


def _operations(shape: Sequence[int], n_experts: int, options: Mapping[str, Any], double: bool) -> list[ops.Operation]:
    *batch, rows, columns = shape
    wide = [ops.product(columns, columns, rows), ops.product(rows, columns, columns)]
    found = [*ops.repeated(wide, n_experts), ops.entries(12 * n_experts * rows * columns)]
    found += [ops.cholesky(columns), ops.cholesky_solve(columns, rows)]
    if options["gate"] == "on":
        own = [ops.product(rows, rows, columns), ops.product(rows, columns, rows)]
        kept = int(min(rows, columns) * options["leading"])
        found += [*ops.repeated(own, n_experts), ops.product(rows, columns, columns)]
        found += ops.thin_svd(rows, columns, kept, double=double)
    return ops.repeated(found, math.prod(batch))


ACE = MergeMethod(
    "ace",
    merge,
    "matrix",
    About(
        "ACTMat on centred estimates with a ridge; where experts differ in size, normalised and refined.",
        "D_0 = (sum_t A_t R_t) (sum_t R_t + 1 c)^-1, R_t = A_t^T A_t + e_t I, A_t = D_t - mean row",
        "Xu et al., ACE-Merging: Data-Free Model Merging with Adaptive Covariance Estimation, arXiv:2603.02945",
        plan_note=(
            "an expert without a spread over its rows (a zero delta) is left out of that tensor, and the answer "
            "depends on the unit of the deltas: a common factor of all experts can open or close the gate"
        ),
        formerly="Before, 'ace' was the centring step alone; that method is now called 'centred'",
    ),
    laws=frozenset({"permutation", "odd", "zero_expert", "zeros"}),
    lowrank=in_cores(merge, site_of=_site),
    cost=Cost("(2T + 2) N^3", workspace=_workspace, operations=_operations),
)
