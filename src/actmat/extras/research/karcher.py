"""Method `karcher`.

Shapes: `K` points on the sphere (experts, and the base with `include_base`), `B` tensors of the basis, `T` experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.linalg.chunks import empty_result
from actmat.linalg.inner import inner_products, inner_workspace, weighted_sum
from actmat.methods._shared.per_expert import given_base
from actmat.methods.contract import Bounds, MergeMethod, Weights
from actmat.methods.facets import Access, Combination, Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    weights: Weights = None,
    max_iter: Annotated[int, Bounds(0)] = 10,
    tol: Annotated[float, Bounds(0)] = 1e-5,
    include_base: bool = False,
    of: Literal["weights", "deltas"] = "weights",
) -> Merged:
    """Center of mass of the experts' directions on the unit sphere, at their mean norm.

        W* = (sum_t a_t |W_t|) u*,
        u* = argmin_u sum_t a_t angle(u, W_t / |W_t|)^2,   |u| = 1

    The counterpart of `slerp` for any number of models. The iteration stays in the span of the experts, so that it runs
    on coefficients, with the `T x T` inner products in place of the tensors: they are read twice, not twice per step.

    Args:
        weights: one per expert, `a` before it is normalized to sum 1 (the base's own weight is their mean).
        max_iter: most steps of the fixed-point iteration; 0: the direction of the weighted mean of the unit vectors
            (mergekit's multislerp).
        tol: length of a step, in radians, at which it stops; tensors with a smaller norm have no direction.
        include_base: make the base one of the points.
        of: "deltas": the points are `D_t`, and `D*` is their mean.

    Source:
        H. Karcher, "Riemannian center of mass and mollifier smoothing", Comm. Pure Appl. Math. 30 (1977).
    """
    basis = deltas if of == "deltas" else [given_base("karcher", base), *deltas]
    gram_BB = inner_products(basis)
    combination = combine(gram_BB, weights=weights, max_iter=max_iter, tol=tol, include_base=include_base, of=of)
    return Merged(weighted_sum(basis, combination.coefficients, empty_result(deltas)), combination.stats)


def combine(
    gram_BB: Tensor, *, weights: Weights, max_iter: int, tol: float, include_base: bool, of: str
) -> Combination:
    """The coefficients of `W_0, D_1 .. D_T`, in which the points are `W_t = W_0 + D_t`; or of `D_1 .. D_T`."""
    if of == "deltas":
        if include_base:
            raise ValueError("karcher: include_base needs of='weights'; the base has no delta")
        gram_BB = torch.nn.functional.pad(gram_BB, (1, 0, 1, 0))  # with a base of zero, the weights are the deltas
        combination = combine(gram_BB, weights=weights, max_iter=max_iter, tol=tol, include_base=False, of="weights")
        return Combination(combination.coefficients[1:], combination.stats)
    n_experts = len(gram_BB) - 1
    share = [1.0] * n_experts if weights is None else list(weights)
    if problem := _weights_problem({}, share):
        raise ValueError(f"karcher: {problem}")
    if n_experts == 1 and not include_base:
        return Combination([0.0, 1.0], {"iterations": 0})
    points_KB = torch.eye(n_experts + 1, dtype=torch.float64)
    points_KB[:, 0] = 1.0
    if include_base:
        share = [sum(share) / len(share), *share]
    else:
        points_KB = points_KB[1:]
    alpha_K = torch.tensor(share, dtype=torch.float64) / sum(share)
    if not bool(gram_BB.diagonal()[1:].any()):  # no expert moved: exactly the base, not the base up to rounding
        return Combination([0.0] * (n_experts + 1), {"iterations": 0})
    gram_KK = points_KB @ gram_BB @ points_KB.mT
    norm_K = gram_KK.diagonal().clamp_min(0).sqrt()

    valid = norm_K > tol
    if not bool(valid.any()):  # every tensor is zero, or too small to point anywhere: so is the mean
        return Combination([-1.0, *[0.0] * n_experts], {"iterations": 0})
    cosine = gram_KK[valid][:, valid] / torch.outer(norm_K[valid], norm_K[valid])
    mean, iterations = sphere_mean(cosine.clamp(-1, 1), alpha_K[valid] / alpha_K[valid].sum(), max_iter, tol)
    on_points_K = torch.zeros_like(norm_K)
    on_points_K[valid] = float(alpha_K @ norm_K) * mean / norm_K[valid]
    in_basis_B = on_points_K @ points_KB
    in_basis_B[0] -= 1.0
    return Combination(in_basis_B.tolist(), {"iterations": iterations})


def sphere_mean(cosine_KK: Tensor, alpha_K: Tensor, max_iter: int, tol: float) -> tuple[Tensor, int]:
    """Coefficients of the weighted Karcher mean of unit vectors with these inner products, and the steps taken.

    Fixed-point iteration `m <- exp_m(sum_k a_k log_m(u_k))`, started at the normalized weighted mean (at the first
    vector where that mean vanishes).
    """
    mean_K = alpha_K.clone()
    length = _length(cosine_KK, mean_K)
    if length < tol:
        mean_K, length = torch.zeros_like(alpha_K), 1.0
        mean_K[0] = 1.0
    mean_K /= length
    for step in range(max_iter):
        dot_K = (cosine_KK @ mean_K).clamp(-1, 1)
        angle_K = dot_K.acos()
        # angle / sin(angle) tends to 1 at 0 and has no limit at pi, where the direction of log is not defined
        away = (angle_K >= tol) & (angle_K.sin() > 0)
        pull_K = torch.where(away, alpha_K * angle_K / angle_K.sin().where(away, torch.ones(())), 0.0)
        tangent_K = pull_K - (pull_K @ dot_K) * mean_K
        length = _length(cosine_KK, tangent_K)
        if length < tol:
            return mean_K, step
        mean_K = math.cos(length) * mean_K + math.sin(length) / length * tangent_K
        mean_K /= _length(cosine_KK, mean_K)
    return mean_K, max_iter


def _length(cosine_KK: Tensor, vector_K: Tensor) -> float:
    return math.sqrt(max(0.0, float(vector_K @ cosine_KK @ vector_K)))


def _weights_problem(options: Mapping[str, Any], weights: Sequence[float]) -> str | None:
    listed = ", ".join(f"{w:g}" for w in weights)
    return None if sum(weights) > 0 else f"expected weights with a positive sum, found {listed}"


KARCHER = MergeMethod(
    "karcher",
    merge,
    "tensor",
    laws=frozenset({"permutation", "single", "identical", "left_orthogonal", "right_orthogonal", "zeros"}),
    access=Access(
        streams=True,
        walks_again=True,
        base=lambda options: options["of"] == "weights",
        baseless=lambda options, n_experts: not options.get("include_base", False) and options.get("of") != "deltas",
    ),
    cost=MethodCost(
        workspace=lambda shape, n_experts, options: inner_workspace(math.prod(shape), n_experts + 1),
    ),
    combine=combine,
    weights_problem=_weights_problem,
)
