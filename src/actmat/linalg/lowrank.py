"""Low-rank matrices in factored form, and the common bases in which several of them become small.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of one factor pair, `P`, `Q` ranks of the common
column and row bases (`P, Q <= sum R_t`), or of the bases of one pair, `K = min(P, Q)`. Leading batch axes are allowed
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actmat.linalg.gram import column_gram
from actmat.linalg.lapack import Retries, economy_svd, eigh

BLOCKS = 3
"""Blocks of the Krylov space in which a matrix is truncated."""

SPARE = 8
"""Directions of a block beyond those that are kept."""

WELL_CONDITIONED = 1e7
"""Bound on the condition number of a Gram matrix with a unit diagonal, up to which its Cholesky factor makes bases:
they are orthonormal to `eps64` times it, `1e-9`, far below the rounding of factors in float32."""

FEW_OF = 256
"""Short side from which a matrix is truncated in a Krylov space; below it, the whole decomposition is cheap."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrix `b_OR @ a_RI` (any scaling, such as LoRA's alpha / r, already folded in)."""

    b_OR: Tensor
    a_RI: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape `*batch O I` of the matrix."""
        return torch.Size([*self.b_OR.shape[:-1], self.a_RI.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors."""
        return self.b_OR.dtype

    @property
    def rank(self) -> int:
        """Number of columns of `b`: an upper bound of the matrix's rank."""
        return int(self.b_OR.shape[-1])

    def dense(self) -> Tensor:
        """The `*batch O I` matrix itself."""
        return self.b_OR @ self.a_RI

    def to(self, dtype: torch.dtype) -> LowRank:
        """Both factors in another dtype."""
        return LowRank(self.b_OR.to(dtype), self.a_RI.to(dtype))


@dataclass(frozen=True, slots=True)
class Basis:
    """Orthonormal columns `Q = columns_MN @ change_NN`, which products with a small matrix need not form."""

    columns_MN: Tensor
    change_NN: Tensor | None = None

    def dense(self) -> Tensor:
        """`Q`."""
        return self.columns_MN if self.change_NN is None else self.columns_MN @ self.change_NN

    def times(self, core_NK: Tensor) -> Tensor:
        """`Q @ core`."""
        return self.columns_MN @ (core_NK if self.change_NN is None else self.change_NN @ core_NK)

    def rows(self, core_KN: Tensor) -> Tensor:
        """`core @ Q^T`."""
        return (core_KN if self.change_NN is None else core_KN @ self.change_NN.mT) @ self.columns_MN.mT


@dataclass(frozen=True, slots=True)
class CommonBases:
    """`D_t = P @ cores[t] @ Q^T` for all `t`: orthonormal bases of columns and rows, and factors of the deltas."""

    left: Basis
    right: Basis
    cores: tuple[LowRank, ...]

    @property
    def cores_PQ(self) -> tuple[Tensor, ...]:
        """The cores as matrices."""
        return tuple(core.dense() for core in self.cores)

    def lift(self, core_PQ: Tensor) -> LowRank:
        """The full-size matrix of a small one: `P @ core @ Q^T`, in the shorter of the two factored forms."""
        if core_PQ.shape[-2] <= core_PQ.shape[-1]:
            return LowRank(self.left.dense(), self.right.rows(core_PQ))
        return LowRank(self.left.times(core_PQ), self.right.dense().mT)


def common_bases(deltas: Sequence[LowRank]) -> CommonBases:
    """Orthonormal bases of the joint column and row spaces, and every delta in them, exactly; in float64.

    `P = orth([b_1 ... b_T])`, `Q = orth([a_1^T ... a_T^T])` by QR (no rank decision is taken: where the columns are
    dependent, QR fills up with arbitrary orthonormal columns and the cores are zero there).
    Any method that commutes with orthogonal changes of basis on both sides may then be applied to the cores.
    Cost `O((O + I) r'^2)` with `r' = sum_t R_t`.
    """
    ranks = [d.rank for d in deltas]
    left, b_PR = orthonormal(torch.cat([d.b_OR for d in deltas], dim=-1))
    right, a_QR = orthonormal(torch.cat([d.a_RI for d in deltas], dim=-2).mT)
    cores = map(LowRank, torch.split(b_PR, ranks, dim=-1), torch.split(a_QR.mT, ranks, dim=-2))
    return CommonBases(left, right, tuple(cores))


def orthonormal(columns_MN: Tensor) -> tuple[Basis, Tensor]:
    """`Q`, `R` of a QR decomposition, in float64.

    Of well-conditioned columns in a narrower dtype, `R` is the Cholesky factor of their Gram matrix, which is cheaper
    than reflections. For the scaled `G = L L^T`, `cond(G) <= tr(G) ||L^-1||_F^2` is a bound, not an estimate.
    """
    exact_MN, count = columns_MN.to(torch.float64), columns_MN.shape[-1]
    if columns_MN.dtype != torch.float64 and exact_MN.dim() == 2 and len(exact_MN) >= 2 * count:
        gram_NN = column_gram(exact_MN)
        norm_N = gram_NN.diagonal().sqrt()
        factor_NN, info = torch.linalg.cholesky_ex(gram_NN / torch.outer(norm_N, norm_N))
        if info == 0:
            identity_NN = torch.eye(count, dtype=torch.float64, device=exact_MN.device)
            inverse_NN = torch.linalg.solve_triangular(factor_NN, identity_NN, upper=False)
            if count * torch.linalg.matrix_norm(inverse_NN) ** 2 <= WELL_CONDITIONED:
                return Basis(exact_MN, (inverse_NN / norm_N).mT), factor_NN.mT * norm_N
    q_MN, r_NN = torch.linalg.qr(exact_MN)
    return Basis(q_MN), r_NN


def core_bases(deltas: Sequence[LowRank]) -> tuple[CommonBases, Retries]:
    """The core space: singular vectors of `[b_1 ... b_T]` and `[a_1; ...; a_T]`, and every delta in them, exactly.

    Unlike the bases of `common_bases` these do not depend on the order of the experts, except for signs, so that the
    result of an elementwise method in them depends on the adapters only. Directions of a zero singular value are zero
    in every core; an expert both of whose factors are zero adds none. Cost `O((O + I) r'^2)` with `r' = sum_t R_t`.
    """
    spanning = [d for d in deltas if bool(d.b_OR.any()) or bool(d.a_RI.any())] or deltas
    left = economy_svd(torch.cat([d.b_OR for d in spanning], dim=-1))
    right = economy_svd(torch.cat([d.a_RI for d in spanning], dim=-2))
    p_OP, q_IQ = left.u_MR, right.vh_RN.mT
    cores = tuple(LowRank(p_OP.mT @ d.b_OR, d.a_RI @ q_IQ) for d in deltas)
    return CommonBases(Basis(p_OP), Basis(q_IQ), cores), left.retries + right.retries


def weighted_sum(deltas: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """`sum_t w_t D_t` as `[w_1 b_1, ...] @ [a_1; ...]`, of rank `sum_t R_t` at most."""
    b_OR = torch.cat([d.b_OR * w for d, w in zip(deltas, weights, strict=True)], dim=-1)
    return LowRank(b_OR, torch.cat([d.a_RI for d in deltas], dim=-2))


def inner_products(deltas: Sequence[LowRank]) -> Tensor:
    """`<D_s, D_t>_F` of every two deltas (`T x T`, float64, over all batch elements), from a Gram matrix per side.

    >>> inner_products([LowRank(torch.ones(2, 1), torch.ones(1, 3)), LowRank(torch.eye(2), torch.ones(2, 3))]).tolist()
    [[6.0, 6.0], [6.0, 6.0]]
    """
    every = weighted_sum(deltas, [1.0] * len(deltas)).to(torch.float64)
    gram_RR = (every.b_OR.mT @ every.b_OR) * (every.a_RI @ every.a_RI.mT)
    expert_R = torch.repeat_interleave(torch.arange(len(deltas)), torch.tensor([d.rank for d in deltas]))
    is_of_TR = (expert_R == torch.arange(len(deltas)).unsqueeze(-1)).to(torch.float64)
    return is_of_TR @ gram_RR.reshape(-1, every.rank, every.rank).sum(0) @ is_of_TR.mT


def frobenius_norm(delta: LowRank) -> float:
    """`||b a||_F` from the triangular factors of `b` and `a^T`, in float64, over all batch elements."""
    return float(torch.linalg.norm(orthogonal_core(delta)[0]))


@dataclass(frozen=True, slots=True)
class Truncated:
    """The best approximation of given rank, `b = U sqrt(s)`, `a = sqrt(s) V^T`, and its error.

    `norm` is `||D||_F` and `error` is `||D - b a||_F`, both over all batch elements; `retries` as in `linalg.lapack`.
    """

    value: LowRank
    norm: float
    error: float
    retries: Retries = ()


def truncate(delta: LowRank, rank: int) -> Truncated:
    """Truncate to `rank` (Eckart-Young), or pad with zeros if the delta has fewer directions. float64 inside.

    The singular values are shared between the factors (balanced), so that neither is much larger than the other.
    Cost `O((O + I) R^2 + R^3)`.
    """
    core_PQ, left_OP, right_IQ = orthogonal_core(delta)
    u_PK, s_K, vh_KQ, retries = economy_svd(core_PQ)
    root = s_K[..., :rank].sqrt().unsqueeze(-2)
    b_OR = (left_OP @ u_PK[..., :rank]) * root
    a_RI = ((right_IQ @ vh_KQ.mT[..., :rank]) * root).mT
    missing = max(0, rank - a_RI.shape[-2])
    b_OR, a_RI = torch.nn.functional.pad(b_OR, (0, missing)), torch.nn.functional.pad(a_RI, (0, 0, 0, missing))
    dtype = delta.b_OR.dtype
    value = LowRank(b_OR.to(dtype), a_RI.to(dtype).contiguous())
    return Truncated(value, float(torch.linalg.norm(s_K)), float(torch.linalg.norm(s_K[..., rank:])), retries)


def with_identity(delta_OI: Tensor) -> LowRank:
    """The delta times an identity of its short side, float64."""
    delta_OI = delta_OI.to(torch.float64)
    rows, columns = delta_OI.shape[-2:]
    identity = torch.eye(min(rows, columns), dtype=delta_OI.dtype).expand(*delta_OI.shape[:-2], -1, -1)
    return LowRank(delta_OI, identity) if columns <= rows else LowRank(identity, delta_OI)


def truncate_dense(delta_OI: Tensor, rank: int) -> Truncated:
    """Truncate a matrix to `rank`: products with it are made in its dtype, bases are float64.

    The best approximation in the Krylov space of `BLOCKS` blocks of random combinations of the long side (Musco and
    Musco, 2015, arXiv:1504.05477). The error is that of the result. It exceeded the smallest by 0.02 % for `ties` of
    eight adapters, 0.1 % for singular values like `k^-0.7`, 0.7 % for independent entries (2048 x 2048 to rank 128, in
    a tenth of the time of a singular value decomposition, 2026-11-28). Small matrices are decomposed.
    """
    short, size, dtype = min(delta_OI.shape[-2:]), rank + SPARE, delta_OI.dtype
    if short < FEW_OF or short <= BLOCKS * size:
        return truncate(with_identity(delta_OI), rank)
    if delta_OI.shape[-2] > short:
        turned = truncate_dense(delta_OI.mT, rank)
        return replace(turned, value=LowRank(turned.value.a_RI.mT, turned.value.b_OR.mT))
    random = torch.Generator().manual_seed(short)
    basis_OB = delta_OI @ torch.randn(delta_OI.shape[-1], size, generator=random, dtype=dtype)
    blocks = [torch.linalg.qr(basis_OB.to(torch.float64)).Q]
    for _ in range(BLOCKS - 1):
        basis_OB = delta_OI @ (delta_OI.mT @ blocks[-1].to(dtype))
        blocks.append(torch.linalg.qr(basis_OB.to(torch.float64)).Q)
    basis_OB = torch.linalg.qr(torch.cat(blocks, dim=-1)).Q
    inner_BI = (basis_OB.mT.to(dtype) @ delta_OI).to(torch.float64)
    squares_B, vectors_BB, retries = eigh(inner_BI @ inner_BI.mT)
    root_R = squares_B[..., -rank:].flip(-1).clamp_min(0).sqrt().sqrt()
    vectors_BR = vectors_BB[..., -rank:].flip(-1)
    a_RI = (vectors_BR.mT @ inner_BI) / torch.where(root_R > 0, root_R, 1.0).unsqueeze(-1)
    value = LowRank((basis_OB @ vectors_BR) * root_R.unsqueeze(-2), a_RI)
    error_OI = delta_OI - value.to(dtype).dense()
    norm, error = (float(torch.linalg.vector_norm(x_OI, dtype=torch.float64)) for x_OI in (delta_OI, error_OI))
    return Truncated(value, norm, error, retries)


def padded(delta: LowRank, rank: int) -> Truncated:
    """The delta itself with zeros up to `rank`, of at least its own: nothing is decomposed or rounded.

    A power of two moves from each row of `a` to its column of `b`, or back, so that their norms are alike.
    """
    norms_2R = torch.stack([torch.linalg.vector_norm(delta.a_RI, dim=-1), torch.linalg.vector_norm(delta.b_OR, dim=-2)])
    exponents_R = torch.frexp(norms_2R).exponent.diff(dim=0).squeeze(0).div(-2, rounding_mode="trunc")
    ones_R, zeros = torch.ones_like(norms_2R[0]), rank - delta.rank
    b_OR = torch.nn.functional.pad(delta.b_OR * ones_R.ldexp(exponents_R).unsqueeze(-2), (0, zeros))
    a_RI = torch.nn.functional.pad(delta.a_RI * ones_R.ldexp(-exponents_R).unsqueeze(-1), (0, 0, 0, zeros))
    norm = float(inner_products([delta]).clamp_min(0).sqrt())
    return Truncated(LowRank(b_OR, a_RI), norm, 0.0)


def orthogonal_core(delta: LowRank) -> tuple[Tensor, Tensor, Tensor]:
    """`core_PQ, q_OP, q_IQ` with `D = Q_b core Q_a^T`: `b = Q_b R_b`, `a^T = Q_a R_a`, `core = R_b R_a^T`, in float64.

    The core has the singular values of `D`, and the columns of both `Q` are orthonormal.
    """
    exact = delta.to(torch.float64)
    left, right = torch.linalg.qr(exact.b_OR), torch.linalg.qr(exact.a_RI.mT)
    return left.R @ right.R.mT, left.Q, right.Q
