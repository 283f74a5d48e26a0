"""Method `sce`.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.chunks import chunks_of
from actmat.linalg.masks.election import elect, election_workspace
from actmat.linalg.masks.mask import KEEP_ALL, Mask, Trim, top_trims
from actmat.linalg.scaling import exponent_of, largest_entry, scaled
from actmat.methods.contract import Fraction, MergeMethod
from actmat.methods.facets import Merged, MethodCost


def merge(deltas: Sequence[Tensor], *, select_topk: Fraction = 1.0) -> Merged:
    """Keep the entries of largest variance over experts, weight experts by energy, erase minority signs.

        D* = sum_{t in A} e_t D_t / sum_{t in A} e_t,   e_t = ||D_t||_F^2,
        A = {t: sign(D_t) = sign(sum_t D_t)}

    `D_t` here is the delta on the selected entries: the fraction `select_topk` of largest variance over experts.

    Args:
        select_topk: fraction, of the entries on which the experts differ at all, to keep; 1 keeps every entry.

    Source:
        F. Wan et al., "FuseChat: knowledge fusion of chat models", 2024, arXiv:2408.07990.
    """
    # squares of entries far from 1 leave float32's range; a power of two changes nothing else
    exponent = exponent_of(largest_entry(deltas))
    deltas = [scaled(delta, -exponent) for delta in deltas]
    masks: list[Mask] = [KEEP_ALL] * len(deltas)
    if select_topk < 1:
        variance_N, trim = _selection(deltas, select_topk)
        masks = [Where(variance_N, dataclasses.replace(trim)) for _ in deltas]
    energies = [_energy(delta, mask) for delta, mask in zip(deltas, masks, strict=True)]
    total = math.fsum(energies)
    share = [e / total for e in energies] if total > 0 else [1 / len(deltas)] * len(deltas)
    value = elect(deltas, masks, scales=[1.0] * len(deltas), counts=share, mix=share, zero_sign="positive")
    return Merged(scaled(value, exponent), {"largest_share": max(share)})


@dataclass(frozen=True, slots=True)
class Where:
    """Keeps the entries at which a trim keeps a non-zero entry of another tensor, `score_N`."""

    score_N: Tensor
    trim: Trim

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        self.trim.apply(self.score_N[start : start + chunk_P.numel()], start, out_P)
        torch.mul(chunk_P, out_P != 0, out=out_P)


def _selection(deltas: Sequence[Tensor], fraction: float) -> tuple[Tensor, Trim]:
    """Variance over experts per entry, and the trim that keeps its largest values, of those that are not zero."""
    flats_TN = [delta.reshape(-1) for delta in deltas]
    variance_N = torch.empty_like(flats_TN[0])
    different = 0
    for start, sum_P in chunks_of(variance_N):
        # Welford's update, exactly 0 where all experts agree; torch.var over a short leading axis is far slower.
        sum_P.zero_()
        mean_P = torch.zeros_like(sum_P)
        for t, flat_N in enumerate(flats_TN):
            chunk_P = flat_N[start : start + sum_P.numel()]
            step_P = chunk_P - mean_P
            mean_P.add_(step_P, alpha=1 / (t + 1))
            sum_P.addcmul_(step_P, chunk_P - mean_P)
        different += int(torch.count_nonzero(sum_P.div_(len(deltas))))
    (((trim, _),),) = top_trims([variance_N], [[int(fraction * different)]], exact=True)
    return variance_N, trim


def _energy(delta: Tensor, mask: Mask) -> float:
    """`||mask(D)||_F^2`, added up in float64."""
    total = 0.0
    for start, chunk_P in chunks_of(delta.reshape(-1)):
        kept_P = torch.empty_like(chunk_P)
        mask.apply(chunk_P, start, kept_P)
        total += float(kept_P.square_().sum(dtype=torch.float64))
    return total


SCE = MergeMethod(
    "sce",
    merge,
    "tensor",
    laws=frozenset({"permutation", "single", "identical", "homogeneous", "zero_expert", "zeros"}),
    cost=MethodCost(
        workspace=lambda shape, n_experts, options: (
            # deltas that are brought near 1 are copied
            (1 + n_experts + (options["select_topk"] < 1)) * math.prod(shape)
            + election_workspace(math.prod(shape), n_experts)
        ),
    ),
)
