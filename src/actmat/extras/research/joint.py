"""Singular vectors of all experts together: a joint column basis.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` directions of the joint
basis. Leading batch axes are allowed. Everything is float64 inside; callers round once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries
from actmat.linalg.svd import (
    COLUMNS,
    RANK_RTOL,
    accuracy_of,
    gram_is_enough,
    gram_spectrum,
    numerical_range,
    row_gram,
    thin_svd,
)


@dataclass(frozen=True, slots=True)
class JointBasis:
    """`[D_1 ... D_T] = U diag(s) [V_1^T ... V_T^T]` on the kept directions.

    `R` is the largest rank in the batch; elements of lower rank have zeros in `u` and `s` and False in `on` beyond it.
    """

    u_OR: Tensor
    s_R: Tensor
    on_R: Tensor
    retries: Retries = ()

    def coordinates(self, delta_OI: Tensor) -> Tensor:
        """`U^T D_t = diag(s) V_t^T` (`R x I`), computed in float64, in the dtype of the delta.

        A zero delta has coordinates that are exactly zero, which slices of a computed SVD would not have.
        """
        return _project(self.u_OR, delta_OI)

    def whitened(self, delta_OI: Tensor) -> Tensor:
        """`diag(s)^-1 U^T D_t = V_t^T` (`R x I`)."""
        inverse_R = torch.where(self.on_R, self.s_R, torch.inf).reciprocal()
        return _project(self.u_OR * inverse_R.unsqueeze(-2), delta_OI)


def joint_basis(
    deltas: Sequence[Tensor],
    *,
    atol: float = 0.0,
    rtol: float = RANK_RTOL,
    accuracy: torch.dtype | None = None,
    atol_spares_small: bool = False,
) -> JointBasis:
    """Left singular vectors and singular values of `[D_1 ... D_T]` (`O x T I`).

    For float32 accuracy the concatenation is not formed: `[D_1 ... D_T] [D_1 ... D_T]^T = sum_t D_t D_t^T`.

    Args:
        atol: directions with `s <= atol` are dropped.
        rtol: directions with `s <= rtol * s_1` are dropped as well.
        accuracy: see `linalg.svd.thin_svd`.
        atol_spares_small: leave `atol` out for a matrix of which it would drop every direction.

    Raises:
        NumericalError: a matrix is not finite, or its decomposition did not converge.
    """
    rows, width = deltas[0].shape[-2:]
    if gram_is_enough(accuracy or accuracy_of(deltas[0]), rtol) and rows <= len(deltas) * width:
        gram_OO = row_gram(deltas[0])
        for delta_OI in deltas[1:]:
            gram_OO += row_gram(delta_OI)
        s_R, u_OR, retries = gram_spectrum(gram_OO)
    else:
        svd = thin_svd(torch.cat(list(deltas), dim=-1), accuracy=accuracy, rtol=rtol)
        u_OR, s_R, retries = svd.u_OK, svd.s_K, svd.retries
    floor = torch.where((s_R > atol).any(-1), atol, 0.0) if atol_spares_small else atol
    s_R, rank = numerical_range(s_R, rtol, floor)
    size = int(rank.max())
    s_R = s_R[..., :size]
    on_R = s_R > 0
    return JointBasis(u_OR[..., :size] * on_R.unsqueeze(-2), s_R, on_R, retries)


def _project(basis_OR: Tensor, delta_OI: Tensor) -> Tensor:
    out_RI = delta_OI.new_empty((*delta_OI.shape[:-2], basis_OR.shape[-1], delta_OI.shape[-1]))
    for out_RC, part_OC in zip(*(torch.split(x, COLUMNS, dim=-1) for x in (out_RI, delta_OI)), strict=True):
        out_RC.copy_(basis_OR.mT @ part_OC.to(torch.float64))
    return out_RI
