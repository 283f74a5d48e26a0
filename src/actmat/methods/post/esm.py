"""ESM's scaling between layers: layers that moved more than others of their kind are scaled up, the others down.

L. Li, L. Qi, Q. Tian, X. Geng, "Model Merging in the Essential Subspace", CVPR 2026, arXiv:2602.20208. Of its three
levels of "polarized scaling" this is the one between layers, which looks at the merged delta only. The others belong
to the paper's own rule, which needs the experts' activations.
"""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lowrank import LowRank, frobenius_norm
from actmat.methods.contract import Bounds
from actmat.methods.post.contract import LayerStep, Measures, PostStep

__all__ = ["ESM", "factors", "measure"]


def measure(merged: Tensor | LowRank, base: Tensor | None) -> tuple[float, ...]:
    """`||D||_F` in float64."""
    return (frobenius_norm(merged) if isinstance(merged, LowRank) else frobenius_norm64(merged),)


def factors(measures: Measures, *, power: Annotated[float, Bounds(low=0)] = 2.0) -> dict[tuple[str, str], float]:
    """`(||D_l|| / mean_l' ||D_l'||)^power`, the mean over the matrices of the same kind.

    A kind that occurs once, or whose deltas are all zero, keeps the factor 1.

    Args:
        power: 2 in the authors' code.

    >>> from actmat.methods.post.contract import Layer
    >>> found = {(f"{n}.q", ""): (Layer("*.q", n + 1, 2), (norm,)) for n, norm in enumerate([1.0, 3.0])}
    >>> factors(found)
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
    layers=LayerStep(measure, factors),
)
