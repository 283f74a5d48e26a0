"""The sums that the interference family needs, accumulated over the experts, one delta alive at a time.

    S = sum_t w_t A_t^T A_t        B = sum_t w_t D_t A_t^T A_t        N = sum_t v_t D_t

`w_t` holds the user's weight and the normalizer, `v_t` only the user's weight. Two forms hold the same information:

* primal: `S` and `B` themselves;
* stacked: `A = [sqrt(w_t) A_t]` and `M = [sqrt(w_t) D_t A_t^T]`, so that `S = A^T A` and `B = M A`. Smaller when all
  rows together are fewer than `I`, and the only form that does not square.

Both end as a `Reduced` problem, the only input of the solver.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rows of one factor, `N` side of the reduced Gram matrix
(`I` primal, `T R` dual, `min(T R, I)` stacked), `X` any number of rows, `K` leading eigenvectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.gram import PANELLED_FROM, add_gram, column_gram, mirror
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.krylov import SMALLEST, Wanted, leading
from actmat.linalg.lapack import Retries, economy_svd, eigh
from actmat.linalg.lowrank import LowRank
from actmat.linalg.scaling import scaled

MomentForm = Literal["primal", "dual", "stacked"]


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Eigenvalues (ascending) and eigenvectors (columns; None means the identity) of a reduced Gram matrix.

    All of them, or those above `above` times the largest.
    """

    values_N: Tensor
    vectors_NN: Tensor | None
    retries: Retries = ()
    above: float | None = None


@dataclass(slots=True)
class Reduced:
    """`D* = N + (left - N right^T) G right` with `G` a function of the symmetric `gram`; `right` None: the identity.

    Primal: left = B, gram = S. Dual: left = M, gram = A A^T, right = A. Stacked (A = U s V^T): left = M U,
    gram = diag(s^2), right = diag(s) V^T.
    One state belongs to one thread: the spectrum is computed when first used, and kept.
    """

    left_ON: Tensor | None
    gram_NN: Tensor | None
    right_NI: Tensor | None
    form: MomentForm
    size: int  # side `N` of the reduced Gram matrix
    dtype: torch.dtype  # in which deltas are computed with
    _spectrum: Spectrum | None = field(default=None, repr=False)

    @property
    def has_spectrum(self) -> bool:
        """True if the whole eigendecomposition has already been computed."""
        return self._spectrum is not None and self._spectrum.above is None

    def trace(self) -> float:
        """`tr(S)`, the same in all forms, summed in float64."""
        diagonal = self.spectrum().values_N if self.gram_NN is None else self.gram_NN.diagonal()
        return float(diagonal.double().sum())

    @property
    def _gram(self) -> Tensor:
        assert self.gram_NN is not None, "the stacked form is made with its spectrum"
        return self.gram_NN

    def spectrum(self) -> Spectrum:
        """Eigendecomposition of the reduced Gram matrix, computed once, in float64 whatever the compute dtype.

        Directions near the cut-off have eigenvalues of some `I eps(float32)` of the largest, which a float32
        eigensolver finds to about a percent: enough to move the merged delta by 1e-2. Decomposing the same matrix in
        float64 takes 1.6 times as long and leaves 1e-3. Eigenvalues stay in float64, vectors are rounded.
        """
        if self._spectrum is None or self._spectrum.above is not None:
            self._spectrum = self._full(self._gram.double())
        return self._spectrum

    def spectrum_above(self, rtol: float, at_least: int = 0) -> Spectrum:
        """At least the eigenvalues above `rtol` times the largest: only these if they are few, otherwise all.

        Args:
            at_least: known minimum of their number.
        """
        have = self._spectrum
        if have is not None and (have.above is None or have.above <= rtol):
            return have
        wide_NN, dtype = self._gram.double(), self._gram.dtype
        part = leading(wide_NN, Wanted(rtol, at_least), dtype) if self.size >= SMALLEST else None
        if part is None:
            self._spectrum = self._full(wide_NN)
        else:
            self._spectrum = Spectrum(part.values_K, part.vectors_NK.to(dtype), above=rtol)
        return self._spectrum

    def _full(self, wide_NN: Tensor) -> Spectrum:
        values_N, vectors_NN, retries = eigh(wide_NN)
        return Spectrum(values_N, vectors_NN.to(self.dtype), retries)

    def coordinates(self, rows_XI: Tensor, count: int) -> Tensor:
        """Rows in the `count` leading eigenvectors of `S`, `X K`: their component in the space that a cut-off keeps."""
        spectrum = self._spectrum
        if spectrum is None or spectrum.values_N.numel() < count:
            spectrum = self.spectrum()
        scaled = rows_XI if self.right_NI is None else rows_XI @ self.right_NI.mT
        last = slice(spectrum.values_N.numel() - count, None)
        vectors = spectrum.vectors_NN
        scaled = scaled[:, last] if vectors is None else scaled @ vectors[:, last]
        if self.right_NI is None:
            return scaled
        # eigenvectors of S: A^T u / s (dual), diag(s) v^T / s (stacked: the rows of `right` carry s already)
        return scaled / spectrum.values_N[last].clamp_min(0).sqrt().to(scaled.dtype)


def root_of(delta: LowRank) -> Tensor:
    """`R(b) a`, `R I`, from the QR decomposition of `b`: its Gram matrix is that of `b a`."""
    root_RI: Tensor = torch.linalg.qr(delta.b_OR).R @ delta.a_RI
    return root_RI


class PrimalMoments:
    """`S` and `B`, accumulated in place.

    Args:
        left_OI: buffer in which `B` is accumulated (zeroed here); the caller may pass a slice of a larger buffer.
        term_II: buffer in which one `K_t` is formed, shared by the items of a batch. See `needs_term`.
    """

    def __init__(self, left_OI: Tensor, term_II: Tensor | None) -> None:
        self.left_OI = left_OI.zero_()
        self.gram_II = left_OI.new_zeros(left_OI.shape[-1], left_OI.shape[-1])
        self._term_II = term_II

    @property
    def _term(self) -> Tensor:
        assert self._term_II is not None, "a buffer for K_t was given"
        return self._term_II

    @staticmethod
    def needs_term(factor_rows: int, width: int) -> bool:
        """True if `D_t K_t` (`O I^2` once `K_t` is formed) is cheaper than `(D_t A_t^T) A_t` (`2 O R I`)."""
        return 2 * factor_rows >= width

    def add(self, delta_OI: Tensor, factor_RI: Tensor, weight: float) -> None:
        """Add one expert with `K_t = A_t^T A_t`; a negative weight removes it again."""
        if not self.needs_term(factor_RI.shape[-2], factor_RI.shape[-1]):
            add_gram(self.gram_II, factor_RI, weight)
            same = factor_RI is delta_OI  # then their product is symmetric
            products_OR = column_gram(delta_OI.mT) if same else delta_OI @ factor_RI.mT
            self.left_OI.addmm_(products_OR, factor_RI, alpha=weight)
            return
        term_II = self._term
        add_gram(term_II.zero_(), factor_RI)
        mirror(term_II)
        self._add_term(delta_OI, term_II, weight)

    def add_gram(
        self, delta: Tensor | LowRank, gram_II: Tensor, weight: float, off_diagonal: float, prior: float = 0.0
    ) -> None:
        """Add one expert with a given `K_t` whose off-diagonal entries are multiplied by `off_diagonal`.

        A `prior` adds `D^T D`, brought to the trace of `K_t` and multiplied by it.
        """
        term = self._term.copy_(gram_II)
        root_RI = root_of(delta) if isinstance(delta, LowRank) else delta
        if prior and (size := frobenius_norm64(root_RI)):
            unit_RI = root_RI / size
            term.addmm_(unit_RI.mT, unit_RI, alpha=prior * float(gram_II.diagonal().sum(dtype=torch.float64)))
        if off_diagonal != 1.0:
            diagonal = term.diagonal().clone()
            term.mul_(off_diagonal).diagonal().copy_(diagonal)
        self._add_term(delta, term, weight)

    def _add_term(self, delta: Tensor | LowRank, term_II: Tensor, weight: float) -> None:
        self.gram_II.add_(term_II, alpha=weight)
        if isinstance(delta, LowRank):  # `b (a K)` takes `2 R I^2` operations, `(b a) K` takes `2 O I^2`
            self.left_OI.addmm_(delta.b_OR, delta.a_RI @ term_II, alpha=weight)
        else:
            self.left_OI.addmm_(delta, term_II, alpha=weight)

    def rescale(self, exponent: float, gram_exponent: float) -> None:
        """Multiply what was added by powers of two: `B` as the deltas and `S` together, `S` by the second."""
        scaled(self.left_OI, exponent + gram_exponent, out=self.left_OI)
        scaled(self.gram_II, gram_exponent, out=self.gram_II)

    def reduced(self) -> Reduced:
        """The finished sums; the accumulator must not be used afterwards."""
        self._term_II = None
        mirror(self.gram_II)
        return Reduced(self.left_OI, self.gram_II, None, "primal", len(self.gram_II), self.gram_II.dtype)


class StackedMoments:
    """`A` and `M` for `rows = O`, filled expert by expert; `like` has the width `I`, dtype and device."""

    def __init__(self, form: MomentForm, rows: int, n_experts: int, factor_rows: int, like: Tensor) -> None:
        self._form = form
        self._rows = factor_rows
        self._filled = 0
        self._from_gram = form == "dual" and n_experts * factor_rows >= PANELLED_FROM
        self._roots: list[float] = []
        self.a_NI = like.new_empty(n_experts * factor_rows, like.shape[-1])
        self.m_ON = like.new_empty(rows, n_experts * factor_rows)

    def add(self, delta_OI: Tensor, factor_RI: Tensor, weight: float) -> None:
        """Append the rows of one expert; where they are the delta, `D A^T` is a block of `A A^T` over the root."""
        here = slice(self._filled, self._filled + self._rows)
        torch.mul(factor_RI, math.sqrt(weight), out=self.a_NI[here])
        self._roots.append(math.sqrt(weight) if self._from_gram and factor_RI is delta_OI else 0.0)
        if not self._roots[-1]:
            self.m_ON[:, here] = delta_OI @ self.a_NI[here].mT
        self._filled = here.stop

    def rescale(self, exponent: float, gram_exponent: float) -> None:
        """As `PrimalMoments.rescale`; the factors `A` take the root of the factor of `S`."""
        filled = slice(0, self._filled)
        self._roots = [root * 2.0 ** (gram_exponent / 2 - exponent) for root in self._roots]
        scaled(self.m_ON[:, filled], exponent + gram_exponent / 2, out=self.m_ON[:, filled])
        scaled(self.a_NI[filled], gram_exponent / 2, out=self.a_NI[filled])

    def reduced(self) -> Reduced:
        """The problem in the `A A^T` form, or un-squared from the SVD of `A`."""
        assert self._filled == self.a_NI.shape[0], "every expert has been added"
        dtype = self.a_NI.dtype
        if self._form == "dual":
            gram_NN = column_gram(self.a_NI.mT)
            for index, root in enumerate(self._roots):
                here = slice(index * self._rows, (index + 1) * self._rows)
                if root:
                    torch.mul(gram_NN[here, here], 1 / root, out=self.m_ON[:, here])
            return Reduced(self.m_ON, gram_NN, self.a_NI, "dual", len(self.a_NI), dtype)
        svd = economy_svd(self.a_NI)
        order = torch.arange(svd.s_R.numel() - 1, -1, -1, device=svd.s_R.device)
        s = svd.s_R[order]
        left = self.m_ON @ svd.u_MR[:, order]
        right = s.unsqueeze(-1) * svd.vh_RN[order]
        return Reduced(left, None, right, "stacked", len(s), dtype, _spectrum=Spectrum(s.square(), None, svd.retries))
