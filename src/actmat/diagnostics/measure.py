"""Everything that is measured of one matrix, dense or factored; docs/diagnostics.md defines each number.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of one factor pair, `N` all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.diagnostics.pairs import cosines, pairs
from actmat.diagnostics.rows import PROBES, RowMeasures, Rows, eigen_rank, measure_rows, random_signs
from actmat.diagnostics.spectrum import binned, condition, participation, sum_eigenvalues
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.interference.moments import Reduced
from actmat.linalg.lapack import eigh
from actmat.linalg.lowrank import LowRank

__all__ = ["Kept", "against_base", "measure_dense", "measure_lowrank", "tidy"]

Numbers = dict[str, Any]
"""Fields of a `Measure`, from `norms` on, without those that look at the base."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Which directions of the input a rule with a cut-off used: the `rank` leading ones of its own `S`."""

    rank: int
    cutoff: float


def measure_dense(
    deltas: Sequence[Tensor],
    merged_OI: Tensor,
    *,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
    kept: Kept | None = None,
    rule: Reduced | None = None,
    plain: bool = False,
) -> Numbers:
    """Measure dense deltas `O I` and the merged delta `D* = scale * merged`.

    Args:
        generator: of the probes; None: exact, whatever it costs.
        kept: of a rule that cuts directions off.
        rule: what the rule solved, where it is one of the interference family.
        plain: the rule's `S` is the plain sum of `D_t^T D_t`.
    """
    height, width = merged_OI.shape
    probed = generator is not None and height > PROBES
    if probed:
        assert generator is not None
        signs_MO = random_signs(height, PROBES, merged_OI, generator)
        factors = [signs_MO @ d for d in deltas]
        merged_rows = (signs_MO @ merged_OI) * scale
    else:
        factors, merged_rows = list(deltas), merged_OI * scale
    rows = Rows(factors, lambda t, f: (merged_rows - factors[t]) @ f.mT, probed, width, height)
    found, seen = measure_rows(rows), pairs(deltas)
    energy = None
    if kept is not None and rule is not None:
        energy = [_energy(f, rule, kept.rank) for f in factors]
    values = sum_eigenvalues(deltas, rule if plain else None)
    return {
        **_numbers(found, seen.inner_TT, values, width, kept, energy),
        "merged_norm": tidy(frobenius_norm64(merged_OI) * abs(scale)),
        "sign_conflict": matrix(seen.conflict_TT),
        "probes": PROBES if probed else None,
    }


def measure_lowrank(
    deltas: Sequence[LowRank],
    merged: LowRank | Tensor,
    *,
    scale: float = 1.0,
    kept: Kept | None = None,
    plain: bool = False,
) -> Numbers:
    """The same of `D_t = b_t a_t`, exact, in float64; no `O I` matrix is formed (the merged one may be given as such).

    With `b_t^T b_t = r_t^2` (symmetric root), `F_t = r_t a_t` has `F_t^T F_t = D_t^T D_t`, and everything follows from
    `F F^T` of all experts, `N N`. Signs of entries are not compared.
    """
    exact = [d.to(torch.float64) for d in deltas]
    b_ON = torch.cat([d.b_OR for d in exact], dim=-1)
    a_NI = torch.cat([d.a_RI for d in exact], dim=-2)
    columns_NN, rows_NN = b_ON.mT @ b_ON, a_NI @ a_NI.mT
    where, start = [], 0
    for d in exact:
        where.append(slice(start, start + d.rank))
        start += d.rank
    roots = [_root(columns_NN[at, at]) for at in where]
    factors = [r @ d.a_RI for r, d in zip(roots, exact, strict=True)]
    products_NN = columns_NN * rows_NN
    inner = torch.stack([torch.stack([products_NN[s, t].sum() for t in where]) for s in where])
    height, width = exact[0].shape
    whole = merged.to(torch.float64)

    def apart(t: int, f_RI: Tensor) -> Tensor:
        mine = whole @ f_RI.mT if isinstance(whole, Tensor) else whole.b_OR @ (whole.a_RI @ f_RI.mT)
        return mine * scale - exact[t].b_OR @ (exact[t].a_RI @ f_RI.mT)

    found = measure_rows(Rows(factors, apart, probed=False, width=width, height=height))
    f_NI = torch.cat(factors)
    values_N, vectors_NN, _ = eigh(f_NI @ f_NI.mT)
    values_N = values_N.clamp_min(0)
    energy = None
    if kept is not None and plain:
        # the part of expert t in direction i of S is l_i |u_i restricted to t|^2
        count = min(kept.rank, values_N.numel())
        leading = slice(values_N.numel() - count, None)
        part = vectors_NN[:, leading].square() * values_N[leading]
        energy = [_share(float(part[at].sum()), float(inner[t, t])) for t, at in enumerate(where)]
    norm = frobenius_norm64(whole) if isinstance(whole, Tensor) else _lowrank_norm(whole)
    return {
        **_numbers(found, inner, values_N, width, kept, energy),
        "merged_norm": tidy(norm * abs(scale)),
        "sign_conflict": None,
        "probes": None,
    }


def _numbers(
    rows: RowMeasures,
    inner_TT: Tensor,
    values_N: Tensor,
    width: int,
    kept: Kept | None,
    energy: Sequence[float] | None,
) -> Numbers:
    count = inner_TT.shape[0]
    total = math.sqrt(max(float(inner_TT.sum()), 0.0))
    number = condition(values_N, width)
    return {
        "norms": vector(inner_TT.diagonal().clamp_min(0).sqrt()),
        "effective_rank": vector(rows.effective_rank_T),
        "numerical_rank": tuple(rows.numerical_rank_T.tolist()),
        "sum_effective_rank": tidy(participation(values_N)),
        "sum_numerical_rank": eigen_rank(values_N, width),
        "condition": None if number is None else tidy(number),
        "spectrum": binned(values_N, width),
        "rank_kept": None if kept is None else kept.rank,
        "cutoff": None if kept is None else tidy(kept.cutoff),
        "energy_kept": None if energy is None else tuple(tidy(e) for e in energy),
        "cosine": matrix(cosines(inner_TT)),
        "subspace_overlap": matrix(rows.overlap_TT),
        "chance_overlap": tidy(_chance(rows.effective_rank_T, width)),
        "residual": vector(rows.residual_T),
        "mean_norm": tidy(total / count),
        "sum_norm": tidy(total),
    }


def _chance(effective_rank_T: Tensor, width: int) -> float:
    """Mean over pairs of `sqrt(r_s r_t) / I`: the overlap of independent, uniformly turned row spaces."""
    roots = effective_rank_T[effective_rank_T > 0].sqrt()
    n = roots.numel()
    if n < 2:
        return 0.0
    return float(roots.sum() ** 2 - roots.square().sum()) / (n * (n - 1) * width)


def _energy(rows_RI: Tensor, rule: Reduced, rank: int) -> float:
    """Share of the rows' energy in the `rank` leading directions of the rule's `S`."""
    if rank >= rule.size:
        return 1.0
    inside = torch.linalg.vector_norm(rule.coordinates(rows_RI.to(rule.left_ON.dtype), rank), dtype=torch.float64)
    whole = torch.linalg.vector_norm(rows_RI, dtype=torch.float64)
    return _share(float(inside) ** 2, float(whole) ** 2)


def _share(part: float, whole: float) -> float:
    """`part / whole`, at most 1; nothing of nothing is kept whole."""
    return min(part / whole, 1.0) if whole > 0 else 1.0


def _root(gram_RR: Tensor) -> Tensor:
    """The symmetric square root of a semidefinite matrix."""
    values_R, vectors_RR, _ = eigh(gram_RR)
    return (vectors_RR * values_R.clamp_min(0).sqrt()) @ vectors_RR.mT


def _lowrank_norm(delta: LowRank) -> float:
    """`||b a||_F` by its Gram products; good to 1e-8 where the product cancels."""
    product = (delta.b_OR.mT @ delta.b_OR) * (delta.a_RI @ delta.a_RI.mT)
    return math.sqrt(max(float(product.sum()), 0.0))


def tidy(value: float) -> float:
    """Six significant digits: more than is known of most of these numbers, and short in a file."""
    return float(f"{value:.6g}")


def vector(values_T: Tensor) -> tuple[float, ...]:
    """Numbers of a vector, tidy."""
    return tuple(tidy(v) for v in values_T.tolist())


def matrix(values_TT: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rows of a matrix, tidy."""
    return tuple(vector(row) for row in values_TT)


def half_ulp(rms: float, eps: float) -> float:
    """Half a unit in the last place of numbers of size `rms`, in a dtype with this `eps`: `eps/2 2^floor(log2 rms)`."""
    return eps / 2 * 2.0 ** math.floor(math.log2(rms))


def against_base(norms: Sequence[float], numel: int, base_norm: float, eps: Sequence[float] | None) -> Numbers:
    """What deltas are beside the weights: `relative_norms`, and `snr` where rounding is known (`eps` per expert)."""
    if base_norm <= 0 or not math.isfinite(base_norm):
        return {"relative_norms": None, "snr": None}
    root = math.sqrt(numel)
    snr = None
    if eps is not None:
        snr = tuple(tidy(n / root / half_ulp(base_norm / root, e)) for n, e in zip(norms, eps, strict=True))
    return {"relative_norms": tuple(tidy(n / base_norm) for n in norms), "snr": snr}
