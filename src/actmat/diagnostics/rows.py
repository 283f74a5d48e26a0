"""Measures of row spaces: everything of fourth order in the deltas.

With `K_t = D_t^T D_t`, all of it follows from squared norms of small products:

    a_st = ||D_s D_t^T||_F^2 = <K_s, K_t>              overlap_st = a_st / sqrt(a_ss a_tt)
    effective rank_t = (tr K_t)^2 / ||K_t||_F^2        rho_t^2 = ||(D* - D_t) D_t^T||_F^2 / a_tt

Exact, they cost `O^2 I` products per pair. *Probed*, they cost `2 m O I` per expert: with `y_t = Omega^T D_t`, `Omega`
an `O x m` matrix of independent random signs, the entries of `y_s y_t^T = Omega^T D_s D_t^T Omega` off the diagonal
have mean 0 and variance `a_st`, so the mean of their squares is an unbiased estimate of `a_st`. Its relative standard
deviation is about `sqrt(8 / (m p))` with `p = (tr A)^2 / tr A^2`, `A = D_s D_t^T D_t D_s^T`: at worst, where one
direction holds all, 0.25, half of that for its root; 0.01 on flat spectra. The entries on the diagonal are left out:
there both sides see the same signs, and `tr(D_s D_t^T)` comes in. Ratios use the same probes above and below, so that
`D* = c D_t` gives `rho_t = |1 - c|` and a delta of rank one effective rank 1 whatever the probes.

D. Achlioptas, "Database-friendly random projections", J. Comput. Syst. Sci. 66(4), 2003 (random signs).

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rows of a factor (`O`, or `m` when probed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PROBES = 128
"""`m`: random combinations of output rows. Matrices with no more rows than this are taken as they are."""


def random_signs(rows: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """An `m x O` matrix of independent random signs, drawn on the CPU."""
    signs = torch.randint(0, 2, (PROBES, rows), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).to(like)


def measure_rows(
    factors: Sequence[Tensor], apart: Callable[[int, Tensor], Tensor], shape: Sequence[int], *, probed: bool
) -> dict[str, Tensor]:
    """Fields of a `MatrixRow` on row spaces; float64, on the CPU. A zero delta has rank 0, no overlap and no residual.

    Args:
        factors: `F_t`, `R I`, with `F_t^T F_t = K_t`, exactly or on average over the probes.
        apart: `(t, f_RI) -> (D* - D_t) f^T`, in any orthonormal basis of the outputs; when probed, `Omega^T` of it.
        shape: `O I` of the layer.
        probed: rows of the factors are random combinations.

    >>> f = torch.eye(2)
    >>> measures = measure_rows([f], lambda t, unit_RI: -f @ unit_RI.mT, (2, 2), probed=False)
    >>> round(measures["effective_rank"].item(), 6), round(measures["residual"].item(), 6)
    (2.0, 1.0)
    """
    count = len(factors)
    sizes = [float(torch.linalg.vector_norm(f, dtype=torch.float64)) for f in factors]
    unit = [f / size if size else f for f, size in zip(factors, sizes, strict=True)]
    square = torch.zeros(count, count, dtype=torch.float64)
    effective = torch.zeros(count, dtype=torch.float64)
    residual = torch.zeros(count, dtype=torch.float64)
    for t in range(count):
        if not sizes[t]:
            continue
        for s in range(t):
            square[s, t] = square[t, s] = _squares(unit[s] @ unit[t].mT, probed)
        gram_RR = unit[t].double() @ unit[t].double().mT
        square[t, t] = energy = _squares(gram_RR, probed)
        if not energy:  # probes of one row, or a delta whose probes vanish: nothing to divide by
            continue
        effective[t] = min(max(_squared_trace(gram_RR, probed) / energy, 1.0), *shape)
        residual[t] = math.sqrt(_squares(apart(t, unit[t]) / sizes[t], probed) / energy)
    overlap = normalized(square).clamp(0, 1)
    return {"effective_rank": effective, "residual": residual, "subspace_overlap": overlap}


def normalized(products_TT: Tensor) -> Tensor:
    """`x_st / sqrt(x_ss x_tt)`; 0 if one of them is zero.

    >>> normalized(torch.tensor([[4.0, 1.0], [1.0, 1.0]])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    root_T = products_TT.diagonal().clamp_min(0).sqrt()
    scale = root_T.unsqueeze(0) * root_T.unsqueeze(1)
    return torch.where(scale > 0, products_TT / scale.where(scale > 0, 1.0), 0.0)


def _squares(product_RR: Tensor, probed: bool) -> float:
    """Sum of squares, or its estimate from the entries off the diagonal."""
    total = float(torch.linalg.vector_norm(product_RR, dtype=torch.float64)) ** 2
    if not probed:
        return total
    return max(total - float(product_RR.diagonal().double().square().sum()), 0.0)


def _squared_trace(gram_RR: Tensor, probed: bool) -> float:
    """`(tr K)^2` in the units of `_squares`."""
    diagonal = gram_RR.diagonal()
    total = float(diagonal.sum()) ** 2
    return total - float(diagonal.square().sum()) if probed else total
