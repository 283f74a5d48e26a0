"""Numbers that might tell how much each expert loses in a merge; docs/forecast.md says which of them do.

Every number compares the merged delta `D*` with the delta `D_t` of one expert, and is written so that a larger one is
expected to mean a larger loss. `energies` measures one matrix; `features` adds up matrices, so that big deltas count
most. `E_t = D* - D_t` is what the merge makes wrong for expert `t`; what it does to the outputs depends on the inputs
`z` of the layer, `E||E_t z||^2 = tr(E_t C E_t^T)` with `C = E[z z^T]`. Without data, `C` must be guessed: the delta's
own `K_t = D_t^T D_t` (the residual `rho_t`), its root, the identity, or the base's `W_0^T W_0`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat_experiments.core import output_energy

FEATURES: Mapping[str, str] = {
    "residual": "rho_t, what ACTMat minimises: rms of ||E_t D_t^T|| / ||D_t D_t^T||, weighted by ||D_t||^2",
    "residual_root": "the same with (D_t^T D_t)^(1/2) for the inputs: sqrt(tr(E_t |D_t| E_t^T) / tr(D_t |D_t| D_t^T))",
    "distance": "||E_t|| / ||D_t||",
    "distance_base": "||E_t|| / ||W_0||",
    "distance_base_worst": "the largest ||E_t|| / ||W_0|| of a matrix",
    "distance_inputs": "||E_t W_0^T|| / ||D_t W_0^T||: the inputs guessed from the base's row space",
    "distance_inputs_base": "rms over matrices of ||E_t W_0^T|| / ||W_0 W_0^T||",
    "misalignment": "1 - <D*, D_t> / ||D_t||^2: the share of the expert's own step that is not taken",
    "angle": "1 - cos(D*, D_t)",
    "inflation": "||D*|| / rms_s ||D_s||",
    "inflation_sum": "||D*|| / ||sum_s D_s||",
    "inflation_own": "||D*|| / ||D_t||",
    "inflation_top": "rms over matrices of ||D*||_2 / ||D_t||_2, largest singular values",
    "merged_base": "||D*|| / ||W_0||",
    "own_base": "||D_t|| / ||W_0||, the same for every rule",
    "foreign_rows": "part of D* outside the leading row space of D_t, over ||D_t||",
    "foreign_columns": "part of D* outside the leading column space of D_t, over ||D_t||",
    "outside_base": "share of ||D*||^2 outside the leading singular directions of W_0, over the same of D_t",
    "overlap": "mean over the other experts of ||D_s D_t^T||^2 / (||D_s||^2 ||D_t||^2) * I: 1 by chance",
}
"""Numbers without data: name -> what it is. Of one matrix where nothing else is said; see `features` for sums."""


Energies = Mapping[str, Tensor]
"""Squared norms of one matrix: name -> one float64 per expert. With `|D| = (D^T D)^(1/2)`:

| names | values |
|---|---|
| `own`, `merged`, `total`, `base` | `||D_t||^2`, `||D*||^2`, `||sum_s D_s||^2`, `||W_0||^2` |
| `inner` | `<D*, D_t>` |
| `apart_own`, `own_own` | `||E_t D_t^T||^2`, `||D_t D_t^T||^2` |
| `apart_root`, `own_root` | `tr(E_t |D_t| E_t^T)`, `tr(D_t |D_t| D_t^T)` |
| `apart_base`, `own_base`, `base_base` | `||E_t W_0^T||^2`, `||D_t W_0^T||^2`, `||W_0 W_0^T||^2` |
| `foreign_rows`, `foreign_columns` | `||D* (I - V V^T)||^2`, `||(I - U U^T) D*||^2`, leading `U`, `V` of `D_t` |
| `outside_merged`, `outside_own` | `||X||^2 - ||U^T X V||^2` of `D*` and `D_t`, with those of `W_0` |
| `top_merged`, `top_own` | squared largest singular values of `D*` and `D_t` |
| `overlap` | mean over `s != t` of `||D_s D_t^T||^2 I / (||D_s||^2 ||D_t||^2)`; 0 where a delta is zero |
"""


@dataclass(frozen=True, slots=True)
class Leading:
    """Singular vectors of an expert or the base of one matrix, computed once for many merges.

    Args:
        columns_OR, values, rows_RI: singular vectors and values, all of them.
        rank: how many lead: the effective rank `||D||^4 / ||D D^T||^2`, rounded up.
    """

    columns_OR: Tensor
    values: Tensor
    rows_RI: Tensor
    rank: int

    @classmethod
    def of(cls, matrix_OI: Tensor) -> Leading:
        """Singular vectors, and the effective rank rounded up (0 of a zero matrix)."""
        columns_OR, values_R, rows_RI = torch.linalg.svd(matrix_OI.double(), full_matrices=False)
        square_R = values_R.square()
        fourth = float(square_R.square().sum())
        rank = math.ceil(float(square_R.sum()) ** 2 / fourth - 1e-9) if fourth else 0
        return cls(columns_OR, values_R, rows_RI, min(rank, values_R.numel()))

    @property
    def top(self) -> float:
        """Squared largest singular value."""
        return float(self.values[0]) ** 2


def energies(
    deltas: Sequence[Tensor],
    merged_OI: Tensor,
    base_OI: Tensor,
    *,
    leading: Sequence[Leading] | None = None,
) -> Energies:
    """Squared norms of one matrix from which `features` follow, in float64.

    Args:
        deltas: `D_t`.
        merged_OI: `D*`, scaled as it is added to the base.
        base_OI: `W_0`.
        leading: `Leading.of` every delta and of the base, in this order, when they are known.
    """
    exact = [d.double() for d in deltas]
    merged, base = merged_OI.double(), base_OI.double()
    *parts, whole = leading or [Leading.of(x) for x in (*exact, base)]
    # with D_t = U S V^T: ||E D_t^T|| = ||E V S||, tr(E |D_t| E^T) = ||E V S^(1/2)||^2
    turned = [(merged - d) @ p.rows_RI.mT for d, p in zip(exact, parts, strict=True)]
    own = [_square(d) for d in exact]
    inside = [(_square(merged @ p.rows_RI[: p.rank].mT), _square(p.columns_OR[:, : p.rank].mT @ merged)) for p in parts]
    found: dict[str, Sequence[Tensor | float] | float] = {
        "own": own,
        "merged": _square(merged),
        "total": _square(torch.stack(exact).sum(0)),
        "base": _square(base),
        "inner": [(merged * d).sum() for d in exact],
        "apart_own": [_square(e * p.values) for e, p in zip(turned, parts, strict=True)],
        "own_own": [p.values.pow(4).sum() for p in parts],
        "apart_root": [_square(e * p.values.sqrt()) for e, p in zip(turned, parts, strict=True)],
        "own_root": [p.values.pow(3).sum() for p in parts],
        "apart_base": [_square((merged - d) @ base.mT) for d in exact],
        "own_base": [_square(d @ base.mT) for d in exact],
        "base_base": float(whole.values.pow(4).sum()),
        "foreign_rows": [max(_square(merged) - rows, 0.0) for rows, _ in inside],
        "foreign_columns": [max(_square(merged) - columns, 0.0) for _, columns in inside],
        "outside_merged": _outside(merged, whole),
        "outside_own": [_outside(d, whole) for d in exact],
        "top_merged": float(torch.linalg.matrix_norm(merged, 2)) ** 2,
        "top_own": [p.top for p in parts],
        "overlap": _overlaps(exact, own, base.shape[1]),
    }
    rows = {n: [values] * len(exact) if isinstance(values, float) else values for n, values in found.items()}
    return {n: torch.tensor([float(v) for v in values], dtype=torch.float64) for n, values in rows.items()}


def features(matrices: Sequence[Energies]) -> dict[str, list[float]]:
    """The numbers of `FEATURES` for every expert: name -> `T` values.

    Squared norms are added over matrices before a ratio is taken, so a ratio of norms is that of the whole model;
    "rms over matrices" and "worst" are taken of the ratios of matrices. `rho_t` is weighted as in a report. Where an
    expert has no delta at all, what is divided by it is 0.
    """
    stacked = {name: torch.stack([m[name] for m in matrices]) for name in matrices[0]}
    total = {name: values.sum(0) for name, values in stacked.items()}
    own, merged, base, inner = (total[name] for name in ("own", "merged", "base", "inner"))
    apart = (merged - 2 * inner + own).clamp_min(0)
    apart_MT = (stacked["merged"] - 2 * stacked["inner"] + stacked["own"]).clamp_min(0)
    rho_MT = _ratio(stacked["apart_own"], stacked["own_own"])
    found = {
        "residual": _ratio((rho_MT * stacked["own"]).sum(0), own).sqrt(),
        "residual_root": _ratio(total["apart_root"], total["own_root"]).sqrt(),
        "distance": _ratio(apart, own).sqrt(),
        "distance_base": _ratio(apart, base).sqrt(),
        "distance_base_worst": _ratio(apart_MT, stacked["base"]).amax(0).sqrt(),
        "distance_inputs": _ratio(total["apart_base"], total["own_base"]).sqrt(),
        "distance_inputs_base": _ratio(stacked["apart_base"], stacked["base_base"]).mean(0).sqrt(),
        "misalignment": 1 - _ratio(inner, own),
        "angle": 1 - _ratio(inner, (merged * own).sqrt()),
        "inflation": _ratio(merged, own.mean().expand_as(own)).sqrt(),
        "inflation_sum": _ratio(merged, total["total"]).sqrt(),
        "inflation_own": _ratio(merged, own).sqrt(),
        "inflation_top": _ratio(stacked["top_merged"], stacked["top_own"]).mean(0).sqrt(),
        "merged_base": _ratio(merged, base).sqrt(),
        "own_base": _ratio(own, base).sqrt(),
        "foreign_rows": _ratio(total["foreign_rows"], own).sqrt(),
        "foreign_columns": _ratio(total["foreign_columns"], own).sqrt(),
        "outside_base": _ratio(_ratio(total["outside_merged"], merged), _ratio(total["outside_own"], own)),
        "overlap": _ratio((stacked["overlap"] * stacked["own"]).sum(0), own),
    }
    return {name: values.tolist() for name, values in found.items()}


def activation_features(
    delta: Sequence[Tensor], merged: Sequence[Tensor], weight: Sequence[Tensor], gram: Sequence[Tensor]
) -> dict[str, float]:
    """Errors of the merge on real inputs of one expert, over its matrices.

    `activation_residual`: rms over matrices of `sqrt(E||E_t z||^2 / E||D_t z||^2)`, 1 for the base itself;
    `activation_error`: rms over matrices of `sqrt(E||E_t z||^2 / E||W_t z||^2)`, the error of a layer's outputs.

    Args:
        delta, merged, weight: `D_t`, `D*` and `W_t` of every matrix.
        gram: `E[z z^T]` of the inputs that the expert's layer sees, any multiple.
    """
    residual, error = [], []
    for d_OI, m_OI, w_OI, gram_II in zip(delta, merged, weight, gram, strict=True):
        apart, own, output = (output_energy(x_OI, gram_II) for x_OI in (m_OI - d_OI, d_OI, w_OI))
        residual.append(apart / own if own > 0 else 0.0)
        error.append(apart / output if output > 0 else 0.0)
    return {
        "activation_residual": math.sqrt(math.fsum(residual) / len(residual)),
        "activation_error": math.sqrt(math.fsum(error) / len(error)),
    }


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """`part / whole`, 0 where the whole is."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1.0), 0.0)


def _square(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix)) ** 2


def _outside(matrix_OI: Tensor, base: Leading) -> float:
    inside = base.columns_OR[:, : base.rank].mT @ matrix_OI @ base.rows_RI[: base.rank].mT
    return max(_square(matrix_OI) - _square(inside), 0.0)


def _overlaps(deltas: Sequence[Tensor], own: Sequence[float], width: int) -> list[float]:
    count = len(deltas)
    out = [0.0] * count
    for s, t in itertools.combinations(range(count), 2):
        scale = own[s] * own[t]
        share = _square(deltas[s] @ deltas[t].mT) * width / scale if scale else 0.0
        out[s] += share
        out[t] += share
    return [share / max(count - 1, 1) for share in out]
