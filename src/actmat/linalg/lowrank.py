"""Low-rank matrices in factored form, and the common bases in which several of them become small.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of one factor pair, `P`, `Q` ranks of the common
column and row bases (`P, Q <= sum R_t`). Leading batch axes are allowed everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CommonBases", "LowRank", "common_bases"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrix `b_OR @ a_RI` (any scaling, such as LoRA's alpha / r, already folded in)."""

    b_OR: Tensor
    a_RI: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape `*batch O I` of the matrix that the factors stand for."""
        return torch.Size([*self.b_OR.shape[:-1], self.a_RI.shape[-1]])

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
class CommonBases:
    """`D_t = p_OP @ cores_PQ[t] @ q_IQ.mT` for all `t`, with orthonormal columns in `p_OP` and `q_IQ`."""

    p_OP: Tensor
    q_IQ: Tensor
    cores_PQ: tuple[Tensor, ...]

    def lift(self, core_PQ: Tensor) -> LowRank:
        """The full-size matrix of a small one: `p @ core @ q^T`, in the shorter of the two factored forms."""
        if core_PQ.shape[-2] <= core_PQ.shape[-1]:
            return LowRank(self.p_OP, core_PQ @ self.q_IQ.mT)
        return LowRank(self.p_OP @ core_PQ, self.q_IQ.mT)


def common_bases(deltas: Sequence[LowRank]) -> CommonBases:
    """Orthonormal bases of the joint column and row spaces, and every delta in them, exactly.

    `p = orth([b_1 ... b_T])`, `q = orth([a_1^T ... a_T^T])` by QR (no rank decision is taken: where the columns are
    dependent, QR fills up with arbitrary orthonormal columns and the cores are zero there).
    Any rule that commutes with orthogonal changes of basis on both sides may then be applied to the cores.
    Cost `O((O + I) r'^2)` with `r' = sum_t R_t`.
    """
    p_OP = torch.linalg.qr(torch.cat([d.b_OR for d in deltas], dim=-1)).Q
    q_IQ = torch.linalg.qr(torch.cat([d.a_RI.mT for d in deltas], dim=-1)).Q
    cores = tuple((p_OP.mT @ d.b_OR) @ (d.a_RI @ q_IQ) for d in deltas)
    return CommonBases(p_OP, q_IQ, cores)
