"""OrthoMerge: average the experts' rotations of the base weights, and merge what the rotations leave by another rule.

"OrthoMerge", 2026, arXiv:2602.05943 (public code: Sphere-AI-Lab/OrthoMerge).

Shapes: `T` experts, `O` out_features, `I` in_features, `N` null directions of `W_0^T W`. All
in float64.

**Rotations.** `R_t` maximises `<W_0 R, W>` for a target `W`, over the orthogonal matrices of determinant 1. Where
`W_0^T W` is singular (always where `O < I`), many do; here it is the one of them nearest to the identity, the limit of
the polar factors of `W_0^T W + e I`. The published code takes whichever LAPACK returns, so that its average of the
rotations' generators is arbitrary there. It also admits reflections, whose Cayley transform does not exist: a direction
that `W_0` hardly uses and the expert reverses is enough for one, and its generator is then rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.errors import NumericalError
from actmat.extras.research import tsv
from actmat.linalg import operations as ops
from actmat.linalg.lapack import Retries, economy_svd
from actmat.methods._shared.per_expert import given_base
from actmat.methods._shared.per_matrix import OneMatrix, each_matrix
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import About, Cost, Merged

Targets = Literal["expert", "conflict"]
InnerRule = Literal["task_arithmetic", "ties", "tsv"]
SCALINGS: dict[InnerRule, float] = {"task_arithmetic": 0.2, "ties": 1.0, "tsv": 1.0}
"""Published factors of the merged residuals."""

NULL_RTOL = 2.0**-40
"""Singular values of `W_0^T W` at or below this share of the largest are rounding in float64."""

CANCELLED = 1e-8
"""Length of the sum of the generators, as a share of the sum of their lengths, that is rounding."""

LARGEST_GENERATOR = 1e6
"""Entry of a generator from which on a rotation turns some direction around and its generator is rounding."""


def merge(
    deltas: Sequence[Tensor],
    *,
    base: Tensor,
    targets: Targets = "expert",
    rule: InnerRule = "task_arithmetic",
    scaling: Annotated[float | None, Bounds(low=0)] = None,
    density: Fraction = 0.2,
) -> Merged:
    """`W = W_0 R + scaling rule(W_t - W_0 R_t)`; `R = (I - A)^-1 (I + A)`, `A = mean_t ||A_t|| sum_t A_t / ||..||`.

    `A_t = (R_t + I)^-1 (R_t - I)` is the generator of the rotation `R_t` that brings `W_0` nearest to its target.

    Args:
        targets: "expert": `W_t`, as in the paper's formula; "conflict": `W_0` and only those rows of `D_t` that
            point away from the mean delta, as in the script that the authors run.
        rule: for the residuals: their sum, TIES (entries ranked within the tensor), or TSV-M.
        scaling: of the merged residuals; 0.2 for the sum and 1 for the others unless given.
        density: fraction of the residuals' entries that `ties` keeps.
    """
    factor = SCALINGS[rule] if scaling is None else scaling
    own = partial(_merge, targets=targets, rule=rule, scaling=factor, density=density)
    value, stats = each_matrix(own, [given_base("orthomerge", base), *deltas])
    return Merged(value.to(deltas[0].dtype), stats)


def nearest_rotation(source_OI: Tensor, target_OI: Tensor) -> tuple[Tensor, Retries]:
    """Rotation `R` that maximises `<source R, target>`; among several, the nearest to the identity. float64.

    >>> nearest_rotation(torch.eye(2).double()[:1], torch.eye(2).double()[:1])[0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    u_II, s_I, vh_II, retries = economy_svd(source_OI.mT @ target_OI)
    rank = int((s_I > NULL_RTOL * s_I[:1]).sum())
    if rank < s_I.shape[0]:
        p_NN, _, qh_NN, new = economy_svd(u_II[:, rank:].mT @ vh_II[rank:].mT)
        u_II = torch.cat([u_II[:, :rank], u_II[:, rank:] @ p_NN], dim=1)
        vh_II = torch.cat([vh_II[:rank], qh_NN @ vh_II[rank:]])
        retries += new
    rotation_II = u_II @ vh_II
    if float(torch.linalg.slogdet(rotation_II).sign) < 0:
        rotation_II -= 2 * torch.outer(u_II[:, -1], vh_II[-1])
    return rotation_II, retries


def generator_of(rotation_II: Tensor) -> Tensor:
    """Skew `A = (R + I)^-1 (R - I)`, from which `R = (I - A)^-1 (I + A)`.

    Raises:
        NumericalError: the rotation turns a direction around.
    """
    eye_II = torch.eye(rotation_II.shape[-1], dtype=rotation_II.dtype, device=rotation_II.device)
    found_II: Tensor
    found_II, info = torch.linalg.solve_ex(rotation_II + eye_II, rotation_II - eye_II)
    if int(info) != 0 or not bool((found_II.abs() < LARGEST_GENERATOR).all()):
        raise NumericalError(
            f"orthomerge: the rotation of the base weights ({rotation_II.shape[-1]} inputs) that an expert is nearest "
            "to turns a direction around, for which the Cayley transform does not exist. Likely cause: the expert is "
            "not a fine-tuned form of this base, or its delta is larger than the base weights. Fix: check the base, "
            "or merge this tensor by another method."
        )
    return (found_II - found_II.mT) / 2


def _merge(
    base_and_deltas: Sequence[Tensor], *, targets: Targets, rule: InnerRule, scaling: float, density: float
) -> OneMatrix:
    base_OI, *wide = (matrix_OI.double() for matrix_OI in base_and_deltas)
    mean_OI = torch.stack(wide).mean(0)
    total_II = base_OI.new_zeros((base_OI.shape[-1],) * 2)
    residuals, angles, retries = [], [], Retries()
    for delta_OI in wide:
        moved_OI = delta_OI
        if targets == "conflict":
            moved_OI = delta_OI * ((delta_OI * mean_OI).sum(-1, keepdim=True) < 0)
        generator_II = torch.zeros_like(total_II)
        if bool(moved_OI.any()):  # no rotation at all, rather than one by rounding
            rotation_II, new = nearest_rotation(base_OI, base_OI + moved_OI)
            generator_II, retries = generator_of(rotation_II), retries + new
        angles.append(float(torch.linalg.vector_norm(generator_II)))
        total_II += generator_II
        residuals.append(delta_OI - base_OI @ _less_identity(generator_II))
    size = float(torch.linalg.vector_norm(total_II))
    angle = math.fsum(angles) / len(angles) if size > CANCELLED * math.fsum(angles) else 0.0
    merged_II = total_II * (angle / size) if angle > 0 else torch.zeros_like(total_II)
    value_OI = base_OI @ _less_identity(merged_II) + scaling * _inner(residuals, rule, density)
    return OneMatrix(value_OI, {"angle_max": max(angles), "merged_angle_max": angle}, retries)


def _less_identity(generator_II: Tensor) -> Tensor:
    """`R - I = 2 (I - A)^-1 A`; `I - A` is regular, as the eigenvalues of `A` are imaginary."""
    eye_II = torch.eye(generator_II.shape[-1], dtype=generator_II.dtype, device=generator_II.device)
    found_II: Tensor = torch.linalg.solve(eye_II - generator_II, 2 * generator_II)
    return found_II


def _inner(residuals: Sequence[Tensor], rule: InnerRule, density: float) -> Tensor:
    if rule == "tsv":
        return tsv.merge(residuals).value
    if rule == "task_arithmetic":
        return torch.stack(list(residuals)).sum(0)
    kept = torch.stack([_top(residual_OI, density) for residual_OI in residuals])
    sign_OI = torch.where(kept.sum(0) < 0, -1.0, 1.0)
    agreeing = kept * sign_OI > 0
    return (kept * agreeing).sum(0) / agreeing.sum(0).clamp_min(1)


def _top(residual_OI: Tensor, density: float) -> Tensor:
    """The `N - int((1 - density) N) + 1` entries of largest magnitude, and those equal to the last."""
    size_N = residual_OI.abs().flatten()
    dropped = int(size_N.numel() * (1 - density))
    if dropped == 0:
        return residual_OI
    return residual_OI * (residual_OI.abs() >= size_N.kthvalue(dropped).values)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    # In float64, two elements each: the deltas, stacked deltas and residuals, the base; the singular vectors of an
    # `I x I` matrix with LAPACK's work space, the rotation, its generator, projectors.
    each = 2 * (3 * n_experts + 5) * rows * columns + 2 * 14 * columns * columns
    if options["rule"] == "tsv":
        method = tsv.TSV
        each += 2 * method.cost.workspace((rows, columns), n_experts, method.resolve_options({}))
    return each + 2 * math.prod(batch) * rows * columns


def _operations(shape: Sequence[int], n_experts: int, options: Mapping[str, Any], double: bool) -> list[ops.Operation]:
    *batch, rows, columns = shape
    cube = ops.product(columns, columns, columns)
    each = [ops.product(columns, columns, rows), ops.svd(columns, columns)]
    each += [*ops.repeated([cube], 4), ops.product(rows, columns, columns)]
    if rows < columns:
        each += [*ops.repeated([cube], 2), ops.svd(columns, columns)]
    found = [*ops.repeated(each, n_experts), cube, ops.product(rows, columns, columns)]
    found.append(ops.entries(8 * n_experts * rows * columns))
    if options["rule"] == "tsv":
        method = tsv.TSV
        assert method.cost.operations is not None
        found += method.cost.operations((rows, columns), n_experts, method.resolve_options({}), True)
    return ops.repeated(found, math.prod(batch))


ORTHOMERGE = MergeMethod(
    "orthomerge",
    merge,
    "matrix",
    About(
        "Averages the experts' rotations of the base weights and merges the rest by another rule.",
        "W = W_0 R + a rule(W_t - W_0 R_t), R from A = mean ||A_t|| sum A_t / ||sum A_t||, R_t of W_0 to W_t",
        "OrthoMerge, arXiv:2602.05943",
    ),
    laws=frozenset({"permutation", "left_orthogonal", "right_orthogonal", "zeros"}),
    cost=Cost("4 T N^3", workspace=_workspace, operations=_operations),
)
