"""The gain `G = V (f(l)/l) V^T` of one reduced problem, and `D* = N + (left - N right^T) G right` with it.

The gain is found in the cheapest exact way:

* Cholesky instead of eigenvectors for a ridge, and for a hard cut-off that is proven to remove nothing;
* only the eigenvectors that are kept, where they are few (`linalg.krylov`);

and applied in panels of rows, so that the result can overwrite the numerator. `G` is never formed unless that is
cheaper: `(X V g) V^T` or `X (V g V^T)`, whichever has fewer products, with only the kept columns of `V`; triangular
solves in place of eigenvectors, and the inverse once where there are many rows.

Shapes: `O` out_features, `I` in_features, `N` side of the reduced Gram matrix, `K` kept directions, `X` rows that `G`
is applied to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actmat.linalg.interference.moments import Reduced, Spectrum
from actmat.linalg.interference.rule import Filter, gain
from actmat.linalg.lapack import Retries
from actmat.linalg.panels import multiply, run_panels

Stats = dict[str, float | int | str | bool]

FLOAT32_CONDITION = 1e5
"""Largest condition number at which a ridge system is factorised in float32; beyond it, float64."""

LEADING_PART = 4
"""A leading block of a quarter of the side is factorised first: a 64th of the work, which most failures need."""

PANEL_ROWS = 1024
"""Rows of a panel: enough for the products to run at full speed."""


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


def solve(reduced: Reduced, spectral: Filter, width: int, allow_shortcuts: bool) -> tuple[Gain | None, Stats, Retries]:
    """The gain, its record and the retries; None where no expert moved, so that the filter keeps no direction.

    Args:
        width: in_features `I` of the layer, for the default cut-off and the mean eigenvalue.
        allow_shortcuts: let a solve, or a part of the spectrum, replace the whole where both give the same answer.
    """
    trace = reduced.trace()
    if trace == 0.0:
        return None, {"rank": 0, "solver": f"{reduced.form}/none"}, ()
    rtol = spectral.resolved_rtol(reduced.size, width, reduced.dtype)
    found = _by_cholesky(reduced, spectral, rtol, trace / width) if allow_shortcuts else 0
    if not isinstance(found, int):
        return *found, ()
    cuts = spectral.kind in ("hard", "adaptive")
    spectrum = reduced.spectrum_above(rtol, found) if allow_shortcuts and cuts else reduced.spectrum()
    return *_by_spectrum(reduced, spectrum, spectral, rtol, trace / width), spectrum.retries


def apply_gain(reduced: Reduced, apply: Apply | None, out_OI: Tensor, fill_OI: tuple[Tensor, float] | None) -> None:
    """Write `D*` to `out_OI` (which may be the primal `left_ON`): rows are independent, and a panel is read first.

    Args:
        apply: the gain for all rows; None keeps no direction.
        fill_OI: `(X, a)` for `N = a X`, or None for `N = 0`.
    """
    if apply is None:
        if fill_OI is None:
            out_OI.zero_()
        else:
            torch.mul(fill_OI[0], fill_OI[1], out=out_OI)
        return
    left_ON, to_left, from_right = reduced.left_ON, reduced.gram_NN, reduced.right_NI
    assert left_ON is not None, "the numerator was accumulated"
    if from_right is not None:
        to_left = from_right.mT

    def finished(left_XN: Tensor, here: slice) -> Tensor:
        if fill_OI is not None:
            assert to_left is not None, "the primal form keeps its Gram matrix"
            left_XN = torch.addmm(left_XN, fill_OI[0][here], to_left, alpha=-fill_OI[1])
        value = apply(left_XN)
        if from_right is not None:
            value = value @ from_right
        return value if fill_OI is None else torch.add(value, fill_OI[0][here], alpha=fill_OI[1])

    apply_in_panels(finished, left_ON, out_OI, copies=3 if fill_OI is None else 4)


def apply_in_panels(
    apply: Callable[[Tensor, slice], Tensor], left_ON: Tensor, out_OI: Tensor, *, copies: int = 3
) -> None:
    """`out = apply(left, rows)` in panels of rows; the result may overwrite what it is made of.

    Args:
        copies: of a panel that a call holds.
    """

    def apply_to(here: slice) -> None:
        out_OI[here] = apply(left_ON[here], here)

    rows = len(out_OI)
    panels = [slice(start, min(start + PANEL_ROWS, rows)) for start in range(0, rows, PANEL_ROWS)]
    widest = max(out_OI.shape[-1], left_ON.shape[-1])
    run_panels(apply_to, panels, PANEL_ROWS * widest * copies * out_OI.itemsize)


def _by_cholesky(reduced: Reduced, spectral: Filter, rtol: float, mean: float) -> tuple[Gain, Stats] | int:
    """Gain by a triangular solve; where the spectrum is needed, a number of directions that are known to be kept."""
    if reduced.gram_NN is None:
        return 0
    if spectral.kind == "tikhonov":
        return _ridge(reduced, reduced.gram_NN, spectral.ridge * mean) or 0
    if spectral.kind != "hard" or reduced.has_spectrum:
        return 0
    certified = certified_cholesky(reduced.gram_NN, rtol)
    if isinstance(certified, int):
        return certified
    stats: Stats = {"rank": reduced.size, "cutoff": certified[1], "rtol": rtol, "solver": f"{reduced.form}/cholesky"}
    return Inverse(certified[0], reduced.dtype), stats


def _ridge(reduced: Reduced, gram_NN: Tensor, ridge: float) -> tuple[Gain, Stats] | None:
    """`G = (gram + ridge I)^-1`, factorised in float64 where float32 would lose the ridge in its rounding."""
    condition = float(torch.linalg.matrix_norm(gram_NN, "fro")) / ridge
    dtype = gram_NN.dtype if condition < FLOAT32_CONDITION else torch.float64
    factor = shifted_cholesky(gram_NN, ridge, dtype)
    if factor is None:
        return None
    return Inverse(factor, reduced.dtype), {"ridge": ridge, "solver": f"{reduced.form}/cholesky"}


def _by_spectrum(
    reduced: Reduced, spectrum: Spectrum, spectral: Filter, rtol: float, mean: float
) -> tuple[Gain, Stats]:
    gain_K, stats = gain(spectrum.values_N, spectral, rtol=rtol, mean=mean)
    name = "svd" if spectrum.vectors_NN is None else "eigh" if spectrum.above is None else "lanczos"
    record: Stats = {**stats, "solver": f"{reduced.form}/{name}"}
    if spectrum.basis:
        record["basis"] = spectrum.basis
    if spectrum.refused:
        record["no_lanczos"] = spectrum.refused
    return _gain(spectrum, gain_K, reduced.size), record


def _gain(spectrum: Spectrum, gain_K: Tensor, size: int) -> Gain:
    known, kept = spectrum.values_N.numel(), gain_K.numel()
    if spectrum.vectors_NN is None:
        return Diagonal(torch.cat([gain_K.new_zeros(size - kept), gain_K]))
    vectors = spectrum.vectors_NN[:, known - kept :]
    return EigenPairs(vectors * gain_K.to(vectors.dtype), vectors)


def shifted_cholesky(sym_NN: Tensor, shift: float, dtype: torch.dtype) -> Tensor | None:
    """Lower factor `L` of `sym + shift I = L L^T` in `dtype`, or None when that is not positive definite."""
    shifted = sym_NN.to(dtype, copy=True)
    shifted.diagonal().add_(shift)
    factor, info = torch.linalg.cholesky_ex(shifted)
    return factor if int(info) == 0 else None


def certified_cholesky(sym_NN: Tensor, rtol: float) -> tuple[Tensor, float] | int:
    """float64 Cholesky factor of `sym`, but only if no eigenvalue is at or below `rtol * lambda_max`.

    `min(||sym||_F, ||sym||_inf) = u >= lambda_max`, and by Sylvester's law of inertia a Cholesky factorisation of
    `sym - c I` that succeeds proves `lambda_min > c`. With `c = rtol u + margin` this proves
    `lambda_min > rtol lambda_max`; the margin covers the backward error of the factorisation,
    `(N + 2) eps(float64) tr(sym)` (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 10.3).

    Returns:
        The factor and `rtol u`, an upper bound of the absolute cut-off; or, when the proof does not succeed, a number
        of eigenvalues that are certainly above `rtol * lambda_max`: the side of the leading block up to which the
        factorisation went, by Cauchy's interlacing.
    """
    n, trace = sym_NN.shape[-1], float(sym_NN.diagonal().double().sum())
    norms = torch.linalg.matrix_norm(sym_NN, "fro"), torch.linalg.matrix_norm(sym_NN, float("inf"))
    bound = rtol * 1.001 * float(torch.minimum(*norms))  # 0.1 %: the rounding of the norms themselves
    shift = bound + 4 * (n + 2) * torch.finfo(torch.float64).eps * trace
    if float(sym_NN.diagonal().min()) <= shift:  # lambda_min never exceeds a diagonal entry
        return 0
    for size in (n // LEADING_PART, n):  # nor the smallest eigenvalue of a leading block (Cauchy's interlacing)
        factorised = _positive_definite_part(sym_NN[:size, :size], -shift)
        if factorised < size:
            return factorised
    factor = shifted_cholesky(sym_NN, 0.0, torch.float64)
    return n if factor is None else (factor, bound)


def _positive_definite_part(sym_NN: Tensor, shift: float) -> int:
    """Side of the leading block of `sym + shift I` that a float64 Cholesky factorisation finds positive definite."""
    shifted = sym_NN.to(torch.float64, copy=True)
    shifted.diagonal().add_(shift)
    failed = int(torch.linalg.cholesky_ex(shifted).info)
    return failed - 1 if failed else sym_NN.shape[-1]
