"""Measures of one matrix, dense or factored; docs/diagnostics.md defines each number.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of one factor pair, `N` all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from actmat.diagnostics.rows import PROBES, measure_rows, normalized, random_signs
from actmat.linalg.inner import frobenius_norm64, inner_products
from actmat.linalg.lapack import eigh
from actmat.linalg.lowrank import LowRank, frobenius_norm

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
    height, width = merged_OI.shape
    probed = generator is not None and height > PROBES
    if generator is not None and probed:
        signs_MO = random_signs(height, merged_OI, generator)
        factors = [signs_MO @ d for d in deltas]
        merged_rows = (signs_MO @ merged_OI) * scale
    else:
        factors, merged_rows = list(deltas), merged_OI * scale
    rows = measure_rows(factors, lambda t, f: (merged_rows - factors[t]) @ f.mT, (height, width), probed=probed)
    # a delta or its transpose, whichever can be read without a copy
    inner_TT = inner_products([d.mT if not d.is_contiguous() and d.mT.is_contiguous() else d for d in deltas])
    size = frobenius_norm64(merged_OI) * abs(scale)
    return _numbers(rows, inner_TT, width, size)


def measure_lowrank(deltas: Sequence[LowRank], merged: LowRank | Tensor, *, scale: float = 1.0) -> Numbers:
    """Measure factored deltas `D_t = b_t a_t`, exactly, in float64, as `measure_dense` does.

    No `O I` matrix is formed; the merged delta may be given as one. With `b_t^T b_t = r_t^2` (symmetric root),
    `F_t = r_t a_t` has `F_t^T F_t = D_t^T D_t`, and everything follows from `F F^T` of all experts, `N N`.

    >>> d = LowRank(torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0, 0.0]]))
    >>> numbers = measure_lowrank([d], d, scale=0.5)
    >>> numbers["norms"], numbers["merged_norm"], numbers["residual"]
    ((5.0,), 2.5, (0.5,))
    """
    exact = [d.to(torch.float64) for d in deltas]
    whole = merged.to(torch.float64)
    height, width = exact[0].shape
    b_ON, a_NI = torch.cat([d.b_OR for d in exact], dim=-1), torch.cat([d.a_RI for d in exact], dim=-2)
    columns_NN = b_ON.mT @ b_ON
    products_NN = columns_NN * (a_NI @ a_NI.mT)
    ends = accumulate(d.rank for d in exact)
    spans = [slice(end - d.rank, end) for d, end in zip(exact, ends, strict=True)]
    inner_TT = torch.stack([torch.stack([products_NN[s, t].sum() for t in spans]) for s in spans])
    factors = [_root(columns_NN[t, t]) @ d.a_RI for t, d in zip(spans, exact, strict=True)]

    def apart(t: int, f_RI: Tensor) -> Tensor:
        image = whole @ f_RI.mT if isinstance(whole, Tensor) else whole.b_OR @ (whole.a_RI @ f_RI.mT)
        return image * scale - exact[t].b_OR @ (exact[t].a_RI @ f_RI.mT)

    rows = measure_rows(factors, apart, (height, width), probed=False)
    norm = frobenius_norm64(whole) if isinstance(whole, Tensor) else frobenius_norm(whole)
    return _numbers(rows, inner_TT, width, norm * abs(scale))


def _numbers(rows: Mapping[str, Tensor], inner_TT: Tensor, width: int, merged_norm: float) -> Numbers:
    total = math.sqrt(max(float(inner_TT.sum()), 0.0))
    return {
        "norms": vector(inner_TT.diagonal().clamp_min(0).sqrt()),
        "effective_rank": vector(rows["effective_rank"]),
        "cosine": matrix(normalized(inner_TT).clamp(-1, 1)),
        "subspace_overlap": matrix(rows["subspace_overlap"]),
        "chance_overlap": tidy(_chance(rows["effective_rank"], width)),
        "residual": vector(rows["residual"]),
        "sum_norm": tidy(total),
        "merged_norm": tidy(merged_norm),
    }


def _chance(effective_rank_T: Tensor, width: int) -> float:
    """Mean over pairs of `sqrt(r_s r_t) / I`: the overlap of independent, uniformly turned row spaces."""
    roots = effective_rank_T[effective_rank_T > 0].sqrt()
    n = roots.numel()
    if n < 2:
        return 0.0
    return float(roots.sum() ** 2 - roots.square().sum()) / (n * (n - 1) * width)


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


def matrix(values_TT: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rows of a matrix as rounded numbers."""
    return tuple(vector(row) for row in values_TT)


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
