"""Measures of one matrix, dense or factored; docs/diagnostics.md defines each number.

The residual follows from squared norms of small products, with `K_t = D_t^T D_t`:

    rho_t = ||(D* - D_t) D_t^T||_F / ||K_t||_F

Exact, it costs `O^2 I` products per expert. *Probed*, it costs `2 m O I`: with `y_t = Omega^T D_t`, `Omega` an `O x m`
matrix of independent random signs, the entries of `y_s y_t^T = Omega^T D_s D_t^T Omega` off the diagonal have mean 0
and variance `a_st = ||D_s D_t^T||_F^2`, so the mean of their squares is an unbiased estimate of `a_st`. Its relative
standard deviation is about `sqrt(8 / (m p))` with `p = (tr A)^2 / tr A^2`, `A = D_s D_t^T D_t D_s^T`: at worst, where
one direction holds all, 0.25, half of that for its root; 0.01 on flat spectra. The entries on the diagonal are left
out: there both sides see the same signs, and `tr(D_s D_t^T)` comes in. The ratio uses the same probes above and below,
so that `D* = c D_t` gives `rho_t = |1 - c|` whatever the probes.

D. Achlioptas, "Database-friendly random projections", J. Comput. Syst. Sci. 66(4), 2003 (random signs).

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of a factor pair or rows of a factor, `M` probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.linalg import lowrank
from actmat.linalg.inner import frobenius_norm64, inner_products
from actmat.linalg.lapack import eigh
from actmat.linalg.lowrank import LowRank

PROBES = 128
"""`m`: random combinations of output rows. Matrices with no more rows than this are taken as they are."""

Numbers = dict[str, Any]
"""Fields of a `MatrixRow`, from `norms` on, without those that need the base."""


def measure_dense(
    deltas: Sequence[Tensor],
    merged_OI: Tensor,
    *,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> Numbers:
    """Measure dense deltas `O I` and the merged delta `D* = scale * merged`.

    Args:
        generator: of the probes; None: exact, at any cost.

    >>> d = torch.eye(2)
    >>> numbers = measure_dense([d, -d], 0 * d)
    >>> numbers["cosine"][0], numbers["residual"]
    ((1.0, -1.0), (1.0, 1.0))
    """
    height = merged_OI.shape[0]
    probed = generator is not None and height > PROBES
    if generator is not None and probed:
        signs_MO = torch.randint(0, 2, (PROBES, height), generator=generator, dtype=torch.int8)
        signs_MO = (2 * signs_MO - 1).to(merged_OI)
        factors = [signs_MO @ d for d in deltas]
        merged_rows = (signs_MO @ merged_OI) * scale
    else:
        factors, merged_rows = list(deltas), merged_OI * scale
    residuals = _residuals(factors, lambda t, f: (merged_rows - factors[t]) @ f.mT, probed=probed)
    # a delta or its transpose, whichever can be read without a copy
    inner_TT = inner_products([d.mT if not d.is_contiguous() and d.mT.is_contiguous() else d for d in deltas])
    return _numbers(residuals, inner_TT, frobenius_norm64(merged_OI) * abs(scale))


def measure_lowrank(deltas: Sequence[LowRank], merged: LowRank | Tensor, *, scale: float = 1.0) -> Numbers:
    """Measure factored deltas `D_t = b_t a_t`, exactly, in float64, as `measure_dense` does.

    No `O I` matrix is formed; the merged delta may be given as one. With `b_t^T b_t = r_t^2` (symmetric root),
    `F_t = r_t a_t` has `F_t^T F_t = D_t^T D_t`.

    >>> d = LowRank(torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0, 0.0]]))
    >>> numbers = measure_lowrank([d], d, scale=0.5)
    >>> numbers["norms"], numbers["merged_norm"], numbers["residual"]
    ((5.0,), 2.5, (0.5,))
    """
    exact = [d.to(torch.float64) for d in deltas]
    whole = merged.to(torch.float64)
    factors = [_root(d.b_OR.mT @ d.b_OR) @ d.a_RI for d in exact]

    def apart(t: int, f_RI: Tensor) -> Tensor:
        image = whole @ f_RI.mT if isinstance(whole, Tensor) else whole.b_OR @ (whole.a_RI @ f_RI.mT)
        return image * scale - exact[t].b_OR @ (exact[t].a_RI @ f_RI.mT)

    norm = frobenius_norm64(whole) if isinstance(whole, Tensor) else lowrank.frobenius_norm(whole)
    return _numbers(_residuals(factors, apart, probed=False), lowrank.inner_products(exact), norm * abs(scale))


def _residuals(factors: Sequence[Tensor], apart: Callable[[int, Tensor], Tensor], *, probed: bool) -> list[float]:
    """The residual of every expert; 0 for a delta of zero.

    Args:
        factors: `F_t`, `R I`, with `F_t^T F_t = K_t`, exactly or on average over the probes.
        apart: `(t, f_RI) -> (D* - D_t) f^T`, in any orthonormal basis of the outputs; when probed, `Omega^T` of it.
        probed: rows of the factors are random combinations.
    """
    residuals = []
    for t, factor_RI in enumerate(factors):
        size = float(torch.linalg.vector_norm(factor_RI, dtype=torch.float64))
        unit_RI = factor_RI / size if size else factor_RI
        energy = _squares(unit_RI.double() @ unit_RI.double().mT, probed)
        # a delta of zero, or one whose probes vanish, gives nothing to divide by
        residuals.append(math.sqrt(_squares(apart(t, unit_RI) / size, probed) / energy) if energy else 0.0)
    return residuals


def _squares(product_RR: Tensor, probed: bool) -> float:
    """Sum of squares, or its estimate from the entries off the diagonal."""
    total = float(torch.linalg.vector_norm(product_RR, dtype=torch.float64)) ** 2
    if not probed:
        return total
    return max(total - float(product_RR.diagonal().double().square().sum()), 0.0)


def _numbers(residuals: Sequence[float], inner_TT: Tensor, merged_norm: float) -> Numbers:
    norm_T = inner_TT.diagonal().clamp_min(0).sqrt()
    scale_TT = norm_T.unsqueeze(0) * norm_T.unsqueeze(1)
    cosine_TT = torch.where(scale_TT > 0, inner_TT / scale_TT.where(scale_TT > 0, 1.0), 0.0).clamp(-1, 1)
    return {
        "norms": vector(norm_T),
        "cosine": tuple(map(vector, cosine_TT)),
        "residual": tuple(map(tidy, residuals)),
        "sum_norm": tidy(math.sqrt(max(float(inner_TT.sum()), 0.0))),
        "merged_norm": tidy(merged_norm),
    }


def _root(gram_RR: Tensor) -> Tensor:
    """The symmetric square root of a semidefinite matrix."""
    values_R, vectors_RR, _ = eigh(gram_RR)
    return (vectors_RR * values_R.clamp_min(0).sqrt()) @ vectors_RR.mT


def tidy(value: float) -> float:
    """Round to six significant digits: more than the accuracy of most of these numbers, and short in a file.

    >>> tidy(1234567.0)
    1234570.0
    """
    return float(f"{value:.6g}")


def vector(values_T: Tensor) -> tuple[float, ...]:
    """Entries of a vector as rounded numbers."""
    return tuple(tidy(v) for v in values_T.tolist())


def half_ulp(rms: float, eps: float) -> float:
    """Half a unit in the last place of numbers of size `rms`, in a dtype with this `eps`: `eps/2 2^floor(log2 rms)`.

    >>> half_ulp(1.5, 2.0**-7) == 2.0**-8
    True
    """
    return eps / 2 * 2.0 ** math.floor(math.log2(rms))


def against_base(norms: Sequence[float], numel: int, base_norm: float, eps: Sequence[float] | None) -> Numbers:
    """Sizes of deltas against the weights: `relative_norms`, and `snr` where rounding is known (`eps` per expert).

    >>> against_base([0.5], 4, 2.0, None)
    {'relative_norms': (0.25,), 'snr': None}
    """
    if base_norm <= 0 or not math.isfinite(base_norm):
        return {"relative_norms": None, "snr": None}
    root = math.sqrt(numel)
    snr = None
    if eps is not None:
        snr = tuple(tidy(n / root / half_ulp(base_norm / root, e)) for n, e in zip(norms, eps, strict=True))
    return {"relative_norms": tuple(tidy(n / base_norm) for n in norms), "snr": snr}
