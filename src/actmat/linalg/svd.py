"""Thin singular value decompositions on the numerical range, by the cheaper route that is accurate enough.

Shapes: `O` rows, `I` columns, `K` singular triplets kept, `S <= L` the short and the long side of a matrix, `C` some
columns.
Leading batch axes are allowed everywhere; the rank may differ from one batch element to the next.

**Numerical range.** Singular vectors that belong to a zero singular value are not determined by the matrix: a LAPACK
returns some orthonormal completion, another LAPACK returns another. Here such triplets are *zero*: `u`, `s` and `v`
hold zeros beyond the numerical rank, so that every sum over triplets depends only on the matrix. A singular
value counts as zero at or below `rtol * s_1` with `rtol = RANK_RTOL = 2^-20`, eight units of float32 rounding. That is
above what rounding a product to float32 leaves in its null space (below one unit times `s_1` for factors of
rank 64 on 4096 x 4096), and far below the spectrum of a real delta. It is the same in float32 and float64, so that the
compute dtype does not decide the rank.

**Two routes.** With `eps = 2^-53`, `kappa_i = s_1 / s_i`:

* *orthogonal*: QR of the long side when `L >= 2 S`, then LAPACK's SVD, in float64. Backward stable: the error of
  `s_i` is about `eps s_1`. Used for float64 accuracy; of factors, only the core of their rank is decomposed.
* *gram*: `G = A A^T` (`S x S`) formed and decomposed in float64. The eigenvalues carry an error of about `eps s_1^2`,
  so `s_i` is off by `eps s_1 kappa_i / 2`, and the products `v_i . v_j` of the vectors `A^T u_i / s_i` by about
  `eps kappa_i kappa_j`. An SVD in float32 is off by `2^-24 s_1` and its vectors by `2^-24 kappa_i`; the Gram route is
  the better one while `kappa <= 2^29`, and the numerical range ends at `kappa = 2^20`. Used for float32
  accuracy: one matrix product and a symmetric eigenproblem of the short side, instead of a bidiagonalization. If
  few triplets of a large matrix are requested, only these are computed, and proven to be the largest (`linalg.krylov`).

Source: G. Golub, C. Van Loan, "Matrix Computations", 4th ed., sections 8.6 and 5.4.8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from actmat.linalg.gram import add_gram, mirror
from actmat.linalg.krylov import SMALLEST, Wanted, leading
from actmat.linalg.lapack import Retries, economy_svd, eigh
from actmat.linalg.lowrank import LowRank, orthogonal_core

RANK_RTOL = 2.0**-20
"""Relative singular value at or below which a direction is rounding, in float32 and float64 alike."""

GRAM_RTOL = 2.0**-22
"""Smallest cut-off that the Gram route resolves: the root of the error of its zero eigenvalues, with a margin."""

COLUMNS = 2048
"""Columns of the long side that are widened to float64 at a time. Fixed, so that results do not depend on memory."""


MatrixForm: TypeAlias = Tensor | LowRank
"""A matrix as it is, or as its factors."""


@dataclass(frozen=True, slots=True)
class ThinSVD:
    """`A ~ u_OK diag(s_K) v_IK^T`, singular values descending, float64, zeros beyond the numerical rank.

    `rank` (int64, batch shape) is the numerical rank of the whole matrix, capped at `K` if only `K`
    triplets were computed. `retries` names the retries of a decomposition that did not converge at
    once, see `linalg.lapack`.
    """

    u_OK: Tensor
    s_K: Tensor
    v_IK: Tensor
    rank: Tensor
    retries: Retries = ()

    def scaled(self, weight: float) -> ThinSVD:
        """Decomposition of `weight * A`; the sign goes into `u`, and a weight of zero leaves nothing."""
        if weight == 1:
            return self
        if weight == 0:
            return replace(self, u_OK=self.u_OK * 0, s_K=self.s_K * 0, v_IK=self.v_IK * 0, rank=self.rank * 0)
        return replace(self, u_OK=self.u_OK * (1.0 if weight > 0 else -1.0), s_K=self.s_K * abs(weight))


def thin_svd(
    matrix_OI: MatrixForm,
    *,
    k: int | None = None,
    accuracy: torch.dtype | None = None,
    rtol: float = RANK_RTOL,
    floor: Tensor | float = 0.0,
) -> ThinSVD:
    """The top `k` singular triplets on the numerical range; of factors, from the core of their rank.

    Args:
        k: triplets wanted; all `min(O, I)` when None or larger.
        accuracy: float32 allows the Gram route, float64 does not; default: that of the matrix's dtype.
        rtol: singular values `<= rtol * s_1` are zero.
        floor: singular values `<= floor` are zero as well; a number or a tensor of the batch shape.

    Raises:
        NumericalError: the matrix is not finite, or its decomposition did not converge.
    """
    if isinstance(matrix_OI, LowRank):
        core_PQ, left_OP, right_IQ = orthogonal_core(matrix_OI)
        core = thin_svd(core_PQ, k=k, rtol=rtol, floor=floor)
        size = min(*matrix_OI.shape[-2:], *([] if k is None else [k]))
        u_OK, s_K, v_IK = (
            torch.nn.functional.pad(side, (0, size - core.s_K.shape[-1]))
            for side in (left_OP @ core.u_OK, core.s_K, right_IQ @ core.v_IK)
        )
        return replace(core, u_OK=u_OK, s_K=s_K, v_IK=v_IK)
    if gram_is_enough(accuracy or accuracy_of(matrix_OI), rtol):
        return _gram_svd(matrix_OI, k, rtol, floor)
    u_OS, s_S, v_IS, retries = orthogonal_svd(matrix_OI)
    s_S, rank = numerical_range(s_S, rtol, floor)
    s_K = s_S[..., :k]
    on_1K = (s_K > 0).to(s_K.dtype).unsqueeze(-2)
    return ThinSVD(u_OS[..., :k] * on_1K, s_K, v_IS[..., :k] * on_1K, rank, retries)


def svd_workspace(rows: int, columns: int) -> int:
    """Elements of the matrix's dtype that `thin_svd` or `polar_factor` hold at their peak, result included.

    `12 S^2` for the Gram matrix, its eigenvectors and LAPACK's work space in float64 (two float32 elements each), and
    `4 S L` for a float64 copy, both bases and their product.
    """
    short, long = sorted((rows, columns))
    return 12 * short * short + 4 * short * long


def accuracy_of(matrix: MatrixForm) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if matrix.dtype == torch.float64 else torch.float32


def gram_is_enough(accuracy: torch.dtype, rtol: float) -> bool:
    """True if a float64 Gram matrix resolves float32 accuracy and this cut-off."""
    return accuracy != torch.float64 and rtol >= GRAM_RTOL


def numerical_range(s_K: Tensor, rtol: float = RANK_RTOL, floor: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """`s` with everything `<= max(rtol * s_1, floor)` set to zero, and the number of the others (`*batch`)."""
    if s_K.shape[-1] == 0:
        return s_K, torch.zeros(s_K.shape[:-1], dtype=torch.int64, device=s_K.device)
    bound = torch.maximum(s_K.amax(-1) * rtol, torch.as_tensor(floor, dtype=s_K.dtype, device=s_K.device))
    on = s_K > bound.unsqueeze(-1)
    return s_K * on, on.sum(-1)


def orthogonal_svd(matrix_OI: Tensor) -> tuple[Tensor, Tensor, Tensor, Retries]:
    """`u, s, v, retries` of LAPACK in float64: *all* `min(O, I)` triplets, null directions are LAPACK's completion.

    QR of the long side first when it is at least twice the short one; retries and errors as in `economy_svd`.
    """
    if matrix_OI.shape[-2] < matrix_OI.shape[-1]:
        v_IS, s_S, u_OS, retries = orthogonal_svd(matrix_OI.mT)
        return u_OS, s_S, v_IS, retries
    wide_OI = matrix_OI.to(torch.float64)
    if wide_OI.shape[-2] < 2 * wide_OI.shape[-1]:
        u_OS, s_S, vh_SI, retries = economy_svd(wide_OI)
        return u_OS, s_S, vh_SI.mT, retries
    q_OS, r_SI = torch.linalg.qr(wide_OI)
    u_SS, s_S, vh_SI, retries = economy_svd(r_SI)
    return q_OS @ u_SS, s_S, vh_SI.mT, retries


def short_gram(matrix_OI: Tensor) -> Tensor:
    """`A A^T` when `O <= I`, else `A^T A`: the Gram matrix of the short side, in float64."""
    return row_gram(_short_by_long(matrix_OI))


def row_gram(matrix_OI: Tensor) -> Tensor:
    """`A A^T` (`O x O`) in float64; a narrower dtype is widened some columns at a time."""
    batched = matrix_OI.dim() > 2
    gram_OO = matrix_OI.new_zeros((*matrix_OI.shape[:-1], matrix_OI.shape[-2]), dtype=torch.float64)
    for part_OC in torch.split(matrix_OI, COLUMNS, dim=-1):
        wide_OC = part_OC.to(torch.float64)
        if batched:
            gram_OO += wide_OC @ wide_OC.mT
        else:
            add_gram(gram_OO, wide_OC.mT)
    if not batched:
        mirror(gram_OO)
    return gram_OO


def gram_spectrum(gram_SS: Tensor) -> tuple[Tensor, Tensor, Retries]:
    """Singular values of `A` (descending, without a cut), its left singular vectors, and `retries`, from `A A^T`."""
    values_S, vectors_SS, retries = eigh(gram_SS)
    return values_S.flip(-1).clamp_min(0).sqrt(), vectors_SS.flip(-1), retries


def _gram_svd(matrix_OI: Tensor, k: int | None, rtol: float, floor: Tensor | float) -> ThinSVD:
    """Eigenvectors of the short side's Gram matrix; the long side's vectors are `A^T e_i / s_i`."""
    gram_SS = short_gram(matrix_OI)
    is_large = matrix_OI.dim() == 2 and len(gram_SS) >= SMALLEST
    is_sound = is_large and bool(gram_SS.diagonal().isfinite().all())  # else the whole decomposition says what is wrong
    if k is not None and is_sound:
        pairs = leading(gram_SS, Wanted(rtol**2, k, k, float(floor) ** 2), torch.float32)
        if pairs is not None:
            # zeros beyond the numerical rank, as everywhere
            missing = min(k, len(gram_SS)) - pairs.values_K.numel()
            s_K = torch.nn.functional.pad(pairs.values_K.flip(0).sqrt(), (0, missing))
            vectors_SK = torch.nn.functional.pad(pairs.vectors_NK.flip(-1), (0, missing))
            return _from_short(matrix_OI, s_K, vectors_SK, rtol, floor)
    s_S, vectors_SS, retries = gram_spectrum(gram_SS)
    return replace(_from_short(matrix_OI, s_S, vectors_SS, rtol, floor, k), retries=retries)


def _from_short(
    matrix_OI: Tensor, s_S: Tensor, vectors_SS: Tensor, rtol: float, floor: Tensor | float, k: int | None = None
) -> ThinSVD:
    """The triplets of singular values (descending) and vectors of the short side, of which `k` are taken."""
    s_S, rank = numerical_range(s_S, rtol, floor)
    s_K = s_S[..., :k]
    on_K = s_K > 0
    short_SK = vectors_SS[..., :k] * on_K.unsqueeze(-2)
    inverse_K = torch.where(on_K, s_K, 1.0).reciprocal()
    a_SL = _short_by_long(matrix_OI)
    basis_SK = short_SK * inverse_K.unsqueeze(-2)
    long_LK = torch.cat([a_SC.mT.to(torch.float64) @ basis_SK for a_SC in torch.split(a_SL, COLUMNS, dim=-1)], dim=-2)
    if a_SL is matrix_OI:
        return ThinSVD(short_SK, s_K, long_LK, rank)
    return ThinSVD(long_LK, s_K, short_SK, rank)


def _short_by_long(matrix_OI: Tensor) -> Tensor:
    return matrix_OI if matrix_OI.shape[-2] <= matrix_OI.shape[-1] else matrix_OI.mT
