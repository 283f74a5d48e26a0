"""Steps that give every merged matrix one factor, which depends on measures of all of them.

| step | source |
|---|---|
| `larv` | X. Wang et al., "LARV: Data-Free Layer-wise Adaptive Rescaling Veneer for Model Merging", arXiv:2602.09413, 2026 (the continuous form). |
| `esm` | L. Li, L. Qi, Q. Tian, X. Geng, "Model Merging in the Essential Subspace", CVPR 2026, arXiv:2602.20208. Of its three levels of "polarized scaling" this is the one between layers, which uses the merged delta only. The others belong to the paper's own rule, which needs the experts' activations. |

Shapes: `O` out_features, `I` in_features, `S` the smaller side of a matrix, `L` the larger.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lapack import only_eigenvalues
from actmat.linalg.lowrank import LowRank, frobenius_norm
from actmat.linalg.svd import short_gram
from actmat.methods.contract import Bounds
from actmat.methods.post.contract import LayerStep, Measures, PostStep


def effective_rank(matrix_OI: Tensor) -> float:
    """`exp(H(p))`, `p_j = s_j^2 / sum(s^2)`: 1 for a matrix of rank 1, `min(O, I)` for a multiple of an isometry.

    >>> round(effective_rank(torch.eye(3)), 6), effective_rank(torch.ones(2, 3)) < 1.001
    (3.0, True)
    """
    energy_S, _ = only_eigenvalues(short_gram(matrix_OI))
    energy_S = energy_S.clamp_min(0)
    share_S = energy_S / energy_S.sum()
    return float(torch.special.entr(share_S).sum().exp())


def conflict(base_OI: Tensor, delta_OI: Tensor) -> float:
    """`(||W D^T - D W^T||_F + ||W^T D - D^T W||_F) / (2 ||W||_F ||D||_F)`, in float64.

    The longer side's term comes from Gram matrices of the shorter one: `||D^T W - W^T D||_F^2 = 2 tr(W W^T D D^T) -
    2 tr((W D^T)^2)` where `O <= I`.
    """
    base_SL, delta_SL = (m.to(torch.float64) for m in (base_OI, delta_OI))
    if base_SL.shape[-2] > base_SL.shape[-1]:
        base_SL, delta_SL = base_SL.mT, delta_SL.mT
    cross_SS = base_SL @ delta_SL.mT
    short = float(torch.linalg.norm(cross_SS - cross_SS.mT))
    apart = ((base_SL @ base_SL.mT) * (delta_SL @ delta_SL.mT)).sum() - (cross_SS * cross_SS.mT).sum()
    long = math.sqrt(max(0.0, 2 * float(apart)))
    return (short + long) / (2 * float(torch.linalg.norm(base_SL)) * float(torch.linalg.norm(delta_SL)))


def larv_measure(merged: Tensor | LowRank, base: Tensor | None) -> tuple[float, ...]:
    """Contrast of effective ranks `r_eff(W_0) / r_eff(D)` and conflict; nothing for a zero delta or a zero base."""
    assert base is not None, "the plan checked that there is one"
    delta_OI = merged.dense() if isinstance(merged, LowRank) else merged
    if not bool(delta_OI.any()) or not bool(base.any()):
        return ()
    return effective_rank(base) / effective_rank(delta_OI), conflict(base, delta_OI)


def larv_factors(
    measures: Measures,
    *,
    eta: Annotated[float, Bounds(low=0)] = 1.0,
    rho: Annotated[float, Bounds(low=0)] = 0.5,
    gamma: Annotated[float, Bounds(low=0)] = 3.0,
) -> dict[tuple[str, str], float]:
    """`1 + tanh(gamma (score - 1)) / 2` with `score = e^eta (l / L)^rho / (1 + softplus(z(c)))`.

    `e` is the contrast of effective ranks, `c` the conflict, `z` its distance from the mean over all matrices in units
    of their standard deviation (that of a population). Matrices outside of the layers and zero deltas keep the factor 1
    and count nowhere.

    Args:
        eta: exponent of the contrast.
        rho: exponent of the depth.
        gamma: slope of the gate; 0 leaves every factor at 1.
    """
    scored = {key: entry for key, entry in sorted(measures.items()) if entry[1] and entry[0].number is not None}
    z = dict(zip(scored, _standardised([c for _, (_, c) in scored.values()]), strict=True))
    out = dict.fromkeys(measures, 1.0)
    for key, (layer, (contrast, _)) in scored.items():
        assert layer.number is not None, "chosen above"
        score = contrast**eta * (layer.number / layer.count) ** rho / (1 + _softplus(z[key]))
        out[key] = 1 + math.tanh(gamma * (score - 1)) / 2
    return out


def _standardised(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return [(v - mean) / spread if spread > _SMALLEST_SPREAD else 0.0 for v in values]


_SMALLEST_SPREAD = 1e-8
"""Standard deviation of conflicts, which lie between 0 and 1.5, below which they are equal up to rounding."""


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


LARV = PostStep(
    name="larv",
    summary="Scale each layer by its effective rank against the base's, its conflict with it, and its depth.",
    equation="D_l <- D_l (1 + tanh(3 (e (l/L)^0.5 / (1 + softplus(z(c))) - 1)) / 2)",
    reference="Wang et al., LARV, arXiv:2602.09413, 2026",
    layers=LayerStep(larv_measure, larv_factors, needs_base=True),
)


def esm_measure(merged: Tensor | LowRank, base: Tensor | None) -> tuple[float, ...]:
    """`||D||_F` in float64."""
    return (frobenius_norm(merged) if isinstance(merged, LowRank) else frobenius_norm64(merged),)


def esm_factors(measures: Measures, *, power: Annotated[float, Bounds(low=0)] = 2.0) -> dict[tuple[str, str], float]:
    """`(||D_l|| / mean_l' ||D_l'||)^power`, the mean over the matrices of the same kind.

    A kind that occurs once, or whose deltas are all zero, keeps the factor 1.

    Args:
        power: 2 in the authors' code.

    >>> from actmat.methods.post.contract import Layer
    >>> found = {(f"{n}.q", ""): (Layer("*.q", n + 1, 2), (norm,)) for n, norm in enumerate([1.0, 3.0])}
    >>> esm_factors(found)
    {('0.q', ''): 0.25, ('1.q', ''): 2.25}
    """
    by_kind: dict[str, list[float]] = {}
    for key in sorted(measures):
        layer, (norm,) = measures[key]
        by_kind.setdefault(layer.kind, []).append(norm)
    means = {kind: math.fsum(norms) / len(norms) for kind, norms in by_kind.items()}
    return {
        key: (norm / means[layer.kind]) ** power if means[layer.kind] > 0 else 1.0
        for key, (layer, (norm,)) in measures.items()
    }


ESM = PostStep(
    name="esm",
    summary="Scale each layer by the squared ratio of its merged norm to the mean over layers of its kind.",
    equation="D_l <- D_l (||D_l|| / mean_l' ||D_l'||)^2",
    reference="Li et al., Model Merging in the Essential Subspace, CVPR 2026",
    layers=LayerStep(esm_measure, esm_factors),
)
