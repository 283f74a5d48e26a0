"""The gain `G = V (f(l)/l) V^T` of one problem, in the form in which it is multiplied by rows.

`G` is never formed unless that is cheaper: `(X V g) V^T` or `X (V g V^T)`, whichever has fewer products, with only the
kept columns of `V`; triangular solves in place of eigenvectors, and the inverse once where there are many rows.

Shapes: `N` side of the reduced Gram matrix, `K` kept directions, `X` rows that `G` is applied to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actmat.linalg.panels import multiply

__all__ = ["Apply", "Diagonal", "EigenPairs", "Gain", "Inverse"]

Apply = Callable[[Tensor], Tensor]
"""`X N -> X N`: right-multiplication by `G`."""


class Gain(Protocol):
    """`G` in one of its forms."""

    def applier(self, rows: int) -> Apply:
        """`G` as a function, prepared for so many rows in all."""

    def products(self, rows: int) -> int:
        """Multiplications of one entry by another that `applier(rows)` makes for all rows."""


@dataclass(frozen=True, slots=True)
class Diagonal:
    """`G = diag(gain)`: the problem was solved in the eigenvectors of its Gram matrix."""

    gain_N: Tensor

    def applier(self, rows: int) -> Apply:
        """See `Gain`."""
        return lambda left_XN: left_XN * self.gain_N

    def products(self, rows: int) -> int:
        """See `Gain`."""
        return rows * len(self.gain_N)


@dataclass(frozen=True, slots=True)
class EigenPairs:
    """`G = scaled vectors^T`, the kept eigenvectors with and without their gains."""

    scaled_NK: Tensor
    vectors_NK: Tensor

    def applier(self, rows: int) -> Apply:
        """See `Gain`."""
        size, kept = self.vectors_NK.shape
        # forming the product costs N^2 K and then X N^2; keeping it in two factors costs 2 X N K
        if size * size * kept + rows * size * size < 2 * rows * size * kept:
            product = multiply(self.scaled_NK, self.vectors_NK.mT)
            return lambda left_XN: left_XN @ product
        return lambda left_XN: (left_XN @ self.scaled_NK) @ self.vectors_NK.mT

    def products(self, rows: int) -> int:
        """See `Gain`."""
        size, kept = self.vectors_NK.shape
        return min(size * size * (kept + rows), 2 * rows * size * kept)


@dataclass(frozen=True, slots=True)
class Inverse:
    """`G = (L L^T)^-1`, for rows of `dtype`: a ridge, or a cut-off that removes nothing."""

    factor_NN: Tensor
    dtype: torch.dtype

    def applier(self, rows: int) -> Apply:
        """Two triangular solves per panel, or the inverse once where there are more rows than columns."""
        if rows > len(self.factor_NN):
            inverse = torch.cholesky_inverse(self.factor_NN).to(self.dtype)
            return lambda left_XN: left_XN @ inverse
        factor = self.factor_NN
        return lambda left_XN: torch.cholesky_solve(left_XN.to(factor.dtype).mT, factor).mT.to(self.dtype)

    def products(self, rows: int) -> int:
        """See `Gain`."""
        size = len(self.factor_NN)
        return rows * size * size + (size**3 // 3 if rows > size else 0)
