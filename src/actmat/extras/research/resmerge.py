"""ResMerge: merge what is left of the experts without their leading direction, on the sphere; then add the heads.

"ResMerge", 2026, arXiv:2606.02252 (public code: sunyd0303-cpu/ResMerge-release), for experts of reinforcement learning.

Shapes: `T` experts, `O` out_features, `I` in_features, `H` directions of a head, `J = T H` of all, `P, Q` ranks of the
common bases of low-rank deltas, `R` rows of a block.

With `D_t = H_t + R_t`, a head of `H` singular triplets and its residual, the result is a sum over the `D_t` and the
`H_t` whose coefficients depend only on the inner products of the residuals and of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.linalg import operations as ops
from actmat.linalg.lapack import Retries
from actmat.linalg.singular import join
from actmat.linalg.svd import RANK_RTOL, Way, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import OneMatrix, Shape, each_matrix, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import LINEAR_LAWS, About, Cost, Merged

OPPOSED = 1e-8
"""Length of the sum of unit residuals below which it has no direction; as in the published code."""

BLOCK = 1 << 18
"""Entries of all experts that are widened to float64 at a time."""


def merge(
    deltas: Sequence[Tensor],
    _: Shape = None,
    *,
    head: Annotated[int, Bounds(low=1)] = 1,
    damping: Fraction = 0.3,
    score: bool = True,
    head_budget: Fraction = 0.2,
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """`D* = A + head_budget S_H ||A|| H / ||H||`, `H = sum_t H_t / T`; `A` from the residuals `R_t = D_t - H_t`.

    `q_t = R_t / ||R_t||`, `q` their normalised sum, `c = mean_t <q_t, q>`, `s` the mean cosine of two of them.
    `A = c^b mean_t ||R_t|| q` with `b = 1 - damping ((s + 1) / 2 + (c + 1) / 2) / 2`; `A = mean_t R_t` where
    `c <= 1 / sqrt(T)`, as for residuals without a common direction. `S_H` is the mean over pairs of heads of the
    positive part of their cosine, 1 for one head.

    Args:
        head: singular triplets of each delta that form its head.
        damping: the most by which agreement lowers the exponent `b` from 1.
        score: lower it at all; the published code does so in attention and MLP layers only.
        head_budget: norm of the heads' part relative to that of `A`, where the heads agree fully.
        rtol: a residual of norm at or below `rtol ||D_t||` counts as zero.
    """
    rule = partial(_merge, head=head, damping=damping if score else 0.0, budget=head_budget, rtol=rtol)
    value, stats = each_matrix(rule, deltas)
    return Merged(value.to(deltas[0].dtype), stats)


@dataclass(frozen=True, slots=True)
class _Heads:
    """All heads, `H_t = u_t diag(s_t) v_t^T`, side by side."""

    u_OJ: Tensor
    s_J: Tensor
    v_IJ: Tensor
    size: int
    retries: Retries
    ways: Sequence[Way]

    def of(self, t: int) -> Tensor:
        """`H_t`."""
        own = slice(t * self.size, (t + 1) * self.size)
        return (self.u_OJ[:, own] * self.s_J[own]) @ self.v_IJ[:, own].mT

    def gram(self) -> Tensor:
        """`<H_s, H_t>`, `T x T`, on the CPU."""
        every_JJ = (self.u_OJ.mT @ self.u_OJ) * (self.v_IJ.mT @ self.v_IJ) * torch.outer(self.s_J, self.s_J)
        count = self.s_J.shape[0] // self.size
        return every_JJ.view(count, self.size, count, self.size).sum((1, 3)).cpu()


def _merge(deltas: Sequence[Tensor], *, head: int, damping: float, budget: float, rtol: float) -> OneMatrix:
    """One matrix, in float64; `deltas` may be small cores."""
    heads = _heads(deltas, head)
    residual_TT, head_TT = _residual_gram(deltas, heads, rtol), heads.gram()
    weights_T, numbers = _residual_weights(residual_TT, damping)
    length = math.sqrt(max(0.0, float(weights_T @ residual_TT @ weights_T)))
    agreement = _agreement(head_TT)
    mean_head = math.sqrt(max(0.0, float(head_TT.sum()))) / len(deltas)
    largest = math.sqrt(float(head_TT.diagonal().max()))
    add = budget * agreement * length / mean_head / len(deltas) if mean_head > rtol * largest else 0.0
    out_OI = torch.zeros_like(deltas[0], dtype=torch.float64)
    for delta_OI, weight in zip(deltas, weights_T.tolist(), strict=True):
        out_OI.add_(delta_OI, alpha=weight)
    share_J = (add - weights_T).repeat_interleave(heads.size).to(out_OI.device)
    out_OI += (heads.u_OJ * (heads.s_J * share_J)) @ heads.v_IJ.mT
    return OneMatrix(out_OI, numbers | {"head_agreement_max": agreement}, heads.retries, heads.ways)


def _heads(deltas: Sequence[Tensor], size: int) -> _Heads:
    parts = [thin_svd(delta, k=size) for delta in deltas]
    u_OJ, s_J, v_IJ = join(parts)
    retries = tuple(name for part in parts for name in part.retries)
    return _Heads(u_OJ, s_J, v_IJ, parts[0].s_K.shape[-1], retries, [p.way for p in parts])


def _residual_gram(deltas: Sequence[Tensor], heads: _Heads, rtol: float) -> Tensor:
    """`<R_s, R_t>`, `T x T`, on the CPU; zero for a residual that is rounding of its delta."""
    count, (rows, columns) = len(deltas), deltas[0].shape
    gram_TT = torch.zeros((count, count), dtype=torch.float64, device=deltas[0].device)
    squares_T = torch.zeros(count, dtype=torch.float64, device=deltas[0].device)
    step = max(1, BLOCK // (count * columns))
    for start in range(0, rows, step):
        block = slice(start, start + step)
        cut = _Heads(heads.u_OJ[block], heads.s_J, heads.v_IJ, heads.size, (), ())
        wide = [delta[block].double() for delta in deltas]
        squares_T += torch.stack([w.square().sum() for w in wide])
        flat_TN = torch.stack([(w - cut.of(t)).reshape(-1) for t, w in enumerate(wide)])
        gram_TT += flat_TN @ flat_TN.mT
    on_T = (gram_TT.diagonal() > rtol**2 * squares_T).double()
    return (gram_TT * torch.outer(on_T, on_T)).cpu()


def _residual_weights(gram_TT: Tensor, damping: float) -> tuple[Tensor, dict[str, float | int]]:
    """Weights of the residuals in `A`, and the record."""
    count = gram_TT.shape[0]
    norm_T = gram_TT.diagonal().sqrt()
    on_T = (norm_T > 0).double()
    inverse_T = torch.where(norm_T > 0, norm_T, torch.inf).reciprocal()
    numbers: dict[str, float | int] = {"coherence_max": 0.0, "on_sphere": 0, "no_residual": count - int(on_T.sum())}
    cosine_TT = gram_TT * torch.outer(inverse_T, inverse_T)
    length = math.sqrt(max(0.0, float(cosine_TT.sum())))
    coherence = min(1.0, length / count)
    numbers["coherence_max"] = coherence
    if length <= OPPOSED or coherence <= 1 / math.sqrt(count):
        return on_T / count, numbers
    pairs = _pairs(cosine_TT)
    similarity = float(pairs.mean()) if pairs.numel() else 1.0
    exponent = 1 - damping * ((similarity + 1) / 2 + (coherence + 1) / 2) / 2
    numbers["on_sphere"] = 1
    return coherence**exponent * float(norm_T.mean()) / length * inverse_T, numbers


def _agreement(gram_TT: Tensor) -> float:
    """Mean over pairs of heads of the positive part of their cosine; heads that are zero do not count."""
    norm_T = gram_TT.diagonal().sqrt()
    on_T = norm_T > 0
    if not bool(on_T.any()):
        return 0.0
    norm_T, gram_TT = norm_T[on_T], gram_TT[on_T][:, on_T]
    pairs = _pairs(gram_TT / torch.outer(norm_T, norm_T))
    return min(1.0, float(pairs.clamp_min(0).mean())) if pairs.numel() else 1.0


def _pairs(square_TT: Tensor) -> Tensor:
    """Entries above the diagonal."""
    count = square_TT.shape[0]
    rows, columns = torch.triu_indices(count, count, offset=1)
    return square_TT[rows, columns]


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    joint = n_experts * min(options["head"], rows, columns)
    blocks = (
        8 * max(BLOCK, n_experts * columns) if rows * columns * n_experts > BLOCK else 8 * n_experts * rows * columns
    )
    # The result and a product in float64, then rounded.
    one = max(svd_workspace(rows, columns), 5 * rows * columns, blocks + joint) + 4 * joint * (rows + columns)
    whole: int = one + 2 * math.prod(batch) * rows * columns
    return whole


def _operations(shape: Sequence[int], n_experts: int, options: Mapping[str, Any], double: bool) -> list[ops.Operation]:
    *batch, rows, columns = shape
    size = min(options["head"], rows, columns)
    found = ops.repeated(ops.thin_svd(rows, columns, size, double=double), n_experts)
    found += ops.repeated([ops.product(rows, columns, size)], 2 * n_experts)
    found += [ops.product(n_experts, n_experts, rows * columns), ops.entries(6 * n_experts * rows * columns)]
    return ops.repeated(found, math.prod(batch))


RESMERGE = MergeMethod(
    "resmerge",
    merge,
    "matrix",
    About(
        "Residuals without their leading direction merged on the sphere, plus the mean of the leading directions.",
        "D* = A + 0.2 S_H ||A|| H / ||H||, A = c^b mean ||R_t|| q, q = sum_t R_t / ||R_t|| normalised",
        "ResMerge, arXiv:2606.02252",
        plan_note=(
            "one expert alone is not returned unchanged: its leading direction is shrunk; and experts of rank 1 "
            "have no residual, so that nothing of them is merged ('no_residual' in the records counts them)"
        ),
    ),
    laws=LINEAR_LAWS,
    lowrank=in_cores(merge),
    cost=Cost("T N^3", workspace=_workspace, operations=_operations),
)
