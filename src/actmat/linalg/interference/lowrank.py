"""The interference family on low-rank deltas, exact: no `O x I` matrix is formed.

    D_t = b_t a_t = p M_t q^T        D* = p rule(M_1, ..., M_T) q^T

with orthonormal `p`, `q` from `common_bases`. Exact because the family commutes with orthogonal changes of basis:
`S`, `B` and `N` live in the joint row space, and the eigenvalues of `S` outside it are zero, where a filter is 0.
Two quantities refer to the whole layer and use its `I`: the default cut-off and the mean eigenvalue.

All small matrices are float64: they are cheap, and squaring them then loses nothing that matters.

Shapes: `O` out_features, `I` in_features, `R` rank of one pair, `P`, `Q` ranks of the common bases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.interference.rule import Rule
from actmat.linalg.interference.solver import finish, prepare
from actmat.linalg.interference.spectral_solve import Stats
from actmat.linalg.lowrank import LowRank, common_bases

__all__ = ["TRIM_NEEDS_ENTRIES", "solve_lowrank", "solve_lowrank_with_grams"]

TRIM_NEEDS_ENTRIES = (
    "option 'trim' is not available for low-rank deltas: it selects single entries of the O x I matrix, which the "
    "factors do not show"
)
"""Reason for which a rule that trims has no exact low-rank form."""


def solve_lowrank(
    deltas: Sequence[LowRank], rule: Rule, *, weights: Sequence[float] | None = None
) -> tuple[LowRank, Stats]:
    """The dense answer, factored, with rank at most `sum_t R_t`. Cost `O((O + I) r'^2 + T r'^3)`, `r' = sum_t R_t`.

    Raises:
        ValueError: the rule trims: the largest entries depend on the basis, so there is no exact short form.
    """
    if rule.estimator.trim is not None:
        raise ValueError(f"{TRIM_NEEDS_ENTRIES}. Merge the dense deltas, or leave 'trim' out.")
    exact = [d.to(torch.float64) for d in deltas]
    bases = common_bases(exact)
    factors = None
    if rule.estimator.centre:
        # (b - 1 mean(b)) a: centring acts on the rows of b. Its Gram needs only the R of b's QR, and q.
        centred = (d.b_OR - d.b_OR.mean(dim=-2, keepdim=True) for d in exact)
        factors = [
            _padded(torch.linalg.qr(b).R @ (d.a_RI @ bases.q_IQ), bases.q_IQ.shape[-1])
            for b, d in zip(centred, exact, strict=True)
        ]
    state = prepare(bases.cores_PQ, rule, weights=weights, factors=factors, width=deltas[0].shape[-1])
    core_PQ, stats = finish(state, rule, consume=True)
    return bases.lift(core_PQ).to(deltas[0].b_OR.dtype), stats


def solve_lowrank_with_grams(
    deltas: Sequence[LowRank], grams: Sequence[Tensor], rule: Rule, *, weights: Sequence[float] | None = None
) -> tuple[LowRank, Stats]:
    """The dense answer where `K_t` is given, factored, with rank at most `sum_t R_t`.

    `S` is a full `I x I` matrix, which no basis of the deltas' rows reduces: `q^T S^+ q` is not `(q^T S q)^+`. Only
    the deltas' rows are compressed: `D* = p ((sum_t w_t (p^T b_t) a_t K_t) S^+)`. Cost `O(O r'^2 + T r' I^2 + I^3)`.
    """
    exact = [d.to(torch.float64) for d in deltas]
    p_OP = torch.linalg.qr(torch.cat([d.b_OR for d in exact], dim=-1)).Q
    rows_PI = [(p_OP.mT @ d.b_OR) @ d.a_RI for d in exact]
    state = prepare(rows_PI, rule, weights=weights, grams=grams)
    core_PI, stats = finish(state, rule, consume=True)
    return LowRank(p_OP, core_PI).to(deltas[0].b_OR.dtype), stats


def _padded(factor_RQ: Tensor, rows: int) -> Tensor:
    """Zero rows below, so that experts of different rank have factors of one height."""
    return torch.nn.functional.pad(factor_RQ, (0, 0, 0, max(0, rows - factor_RQ.shape[-2])))
