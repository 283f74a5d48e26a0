"""The gain `G = V (f(l)/l) V^T` of one reduced problem, and `D* = N + (left - N right^T) G right` with it.

The gain is found in the cheapest exact way:

* Cholesky instead of eigenvectors for a ridge, and for a hard cut-off that is proven to remove nothing;
* only the eigenvectors that are kept, if they are few (`linalg.krylov`);

and applied in panels of rows, so that the result can overwrite the numerator. `G` is never formed unless that is
cheaper: `(X V g) V^T` or `X (V g V^T)`, whichever has fewer products, with only the kept columns of `V`; triangular
solves in place of eigenvectors, and the inverse once if there are many rows.

Shapes: `O` out_features, `I` in_features, `N` side of the reduced Gram matrix, `K` kept directions, `X` rows that `G`
is applied to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from actmat.linalg.interference.moments import Reduced, Spectrum
from actmat.linalg.interference.rule import Filter, InterferenceRule, gain
from actmat.linalg.krylov import SMALLEST, Wanted, largest, leading
from actmat.linalg.lapack import Retries

Stats = dict[str, float | int | str | bool]

FLOAT32_CONDITION = 1e5
"""Largest condition number at which a ridge system is factorized in float32; beyond it, float64."""

LEADING_PART = 4
"""A leading block of a quarter of the side is factorized first: a 64th of the work, which most failures need."""

FEW = 1 / 8
"""Share of the directions up to which those that a cut-off removes are computed in place of those that it keeps."""

NEGLIGIBLE = 1e-6
"""Shift of a singular Gram matrix in units of the cut-off: in float32, a hundredth of the rounding of its entries."""

PANEL_ROWS = 1024
"""Rows of a panel: enough for the products to run at full speed."""


Apply = Callable[[Tensor], Tensor]
"""`X N -> X N`: right-multiplication by `G`."""


def _by_eigenpairs(vectors_NK: Tensor, gain_K: Tensor, rows: int) -> Apply:
    """`G = V diag(g) V^T` of the kept eigenvectors, for `rows` rows in all."""
    size, rank = vectors_NK.shape
    scaled_NK = vectors_NK * gain_K.to(vectors_NK.dtype)
    # forming the product costs N^2 K and then X N^2; keeping it in two factors costs 2 X N K
    if size * size * rank + rows * size * size < 2 * rows * size * rank:
        product = scaled_NK @ vectors_NK.mT
        return lambda left_XN: left_XN @ product
    return lambda left_XN: (left_XN @ scaled_NK) @ vectors_NK.mT


def _by_inverse(factor_NN: Tensor, dtype: torch.dtype, rows: int) -> Apply:
    """`G = (L L^T)^-1`: two triangular solves per panel, or the inverse once if there are more rows than columns."""
    if rows > len(factor_NN):
        inverse = torch.cholesky_inverse(factor_NN).to(dtype)
        return lambda left_XN: left_XN @ inverse
    return lambda left_XN: torch.cholesky_solve(left_XN.to(factor_NN.dtype).mT, factor_NN).mT.to(dtype)


def solve(reduced: Reduced, rule: InterferenceRule, width: int, rows: int) -> tuple[Apply | None, Stats, Retries]:
    """The gain as a function, its record and the retries; None if no expert moved, so that no direction is kept.

    With `solver="auto"`, a solve or a part of the spectrum replaces the whole where both give the same answer.

    Args:
        width: in_features `I` of the layer, for the default cut-off and the mean eigenvalue.
        rows: that the gain is applied to, in all.
    """
    spectral, shortcuts, trace = rule.spectral, rule.solver == "auto", reduced.trace()
    if trace == 0.0:
        return None, {"rank": 0, "solver": f"{reduced.form}/none"}, ()
    rtol = spectral.resolved_rtol(reduced.size, width, reduced.dtype)
    solved = _by_cholesky(reduced, spectral, rtol, trace / width, rows) if shortcuts else 0
    if not isinstance(solved, int):
        return *solved, ()
    cuts = spectral.kind in ("hard", "adaptive")
    spectrum = reduced.spectrum_above(rtol, solved) if shortcuts and cuts else reduced.spectrum()
    gain_K, stats = gain(spectrum.values_N, spectral, rtol=rtol, mean=trace / width)
    return _applied(spectrum, gain_K, reduced.size, rows), {**stats, **_record(reduced, spectrum)}, spectrum.retries


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

    for start in range(0, len(out_OI), PANEL_ROWS):
        here = slice(start, start + PANEL_ROWS)
        out_OI[here] = finished(left_ON[here], here)


def _by_cholesky(reduced: Reduced, spectral: Filter, rtol: float, mean: float, rows: int) -> tuple[Apply, Stats] | int:
    """Gain by a triangular solve; if the spectrum is needed, a number of directions that are certainly kept."""
    if reduced.gram_NN is None:
        return 0
    if spectral.kind == "tikhonov":
        return _ridge(reduced, reduced.gram_NN, spectral.ridge * mean, rows) or 0
    if spectral.kind != "hard" or reduced.has_spectrum:
        return 0
    certified = certified_cholesky(reduced.gram_NN, rtol)
    if isinstance(certified, int) and reduced.size >= SMALLEST and 2 * certified >= reduced.size:
        top = largest(reduced.gram_NN.double())
        certified = certified_cholesky(reduced.gram_NN, rtol, sum(top))
        if isinstance(certified, int) and reduced.dtype == torch.float32:
            return _without_the_smallest(reduced, reduced.gram_NN, rtol, top, certified) or certified
    if isinstance(certified, int):
        return certified
    stats: Stats = {"rank": reduced.size, "cutoff": certified[1], "rtol": rtol, "solver": f"{reduced.form}/cholesky"}
    return _by_inverse(certified[0], reduced.dtype, rows), stats


def _without_the_smallest(
    reduced: Reduced, gram_NN: Tensor, rtol: float, top: tuple[float, float], least: int
) -> tuple[Apply, Stats] | None:
    """Gain where nearly all directions are kept: `P (S + e I)^-1 P`, `P = I - U U^T` without the directions cut.

    These are the leading eigenvectors of the inverse, at most `N - kept`. The shift `e` lies far below the rounding of
    a float32 `S`, and makes a singular one invertible. None where they are too many, or one of them lies at the cut-off
    as exactly as the largest eigenvalue, `top` and its residual, is known.
    """
    cutoff, dropped = rtol * top[0], reduced.size - least
    shift = NEGLIGIBLE * cutoff
    factor, factorized = shifted_cholesky(gram_NN, shift, torch.float64)
    if factorized < reduced.size or dropped > FEW * reduced.size:
        return None
    inverse = torch.cholesky_inverse(factor)
    del factor
    removed = leading(inverse, Wanted(0.0, dropped, dropped, 1 / (rtol * sum(top) + shift)), reduced.dtype)
    if removed is None or float(removed.values_K[0]) < 1 / (cutoff + shift):
        return None
    vectors_NK = removed.vectors_NK
    for matrix in (inverse, inverse.mT):
        matrix.addmm_(matrix @ vectors_NK, vectors_NK.mT, alpha=-1.0)
    gain_NN = inverse.to(reduced.dtype)
    stats: Stats = {"rank": reduced.size - vectors_NK.shape[1], "cutoff": cutoff, "rtol": rtol}
    return lambda left_XN: left_XN @ gain_NN, {**stats, "solver": f"{reduced.form}/inverse"}


def _ridge(reduced: Reduced, gram_NN: Tensor, ridge: float, rows: int) -> tuple[Apply, Stats] | None:
    """`G = (gram + ridge I)^-1`, factorized in float64 where float32 would lose the ridge in its rounding."""
    condition = float(torch.linalg.matrix_norm(gram_NN, "fro")) / ridge
    dtype = gram_NN.dtype if condition < FLOAT32_CONDITION else torch.float64
    factor, factorized = shifted_cholesky(gram_NN, ridge, dtype)
    if factorized < reduced.size:
        return None
    return _by_inverse(factor, reduced.dtype, rows), {"ridge": ridge, "solver": f"{reduced.form}/cholesky"}


def _record(reduced: Reduced, spectrum: Spectrum) -> Stats:
    name = "svd" if spectrum.vectors_NN is None else "eigh" if spectrum.above is None else "lanczos"
    return {"solver": f"{reduced.form}/{name}"}


def _applied(spectrum: Spectrum, gain_K: Tensor, size: int, rows: int) -> Apply:
    count, rank = spectrum.values_N.numel(), gain_K.numel()
    if spectrum.vectors_NN is None:  # the problem was solved in the eigenvectors of its Gram matrix
        gain_N = torch.cat([gain_K.new_zeros(size - rank), gain_K])
        return lambda left_XN: left_XN * gain_N
    return _by_eigenpairs(spectrum.vectors_NN[:, count - rank :], gain_K, rows)


def shifted_cholesky(sym_NN: Tensor, shift: float, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Lower factor `L` of `sym + shift I = L L^T` in `dtype`, and the side of the leading block that it factorizes.

    The side is `N` if the matrix is positive definite; if it is less, the factor is of no use.
    """
    shifted = sym_NN.to(dtype, copy=True)
    shifted.diagonal().add_(shift)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    return factor, int(failed) - 1 if int(failed) else len(sym_NN)


def certified_cholesky(sym_NN: Tensor, rtol: float, largest: float = math.inf) -> tuple[Tensor, float] | int:
    """float64 Cholesky factor of `sym`, but only if no eigenvalue is at or below `rtol * lambda_max`.

    `min(||sym||_F, ||sym||_inf, largest) = u >= lambda_max`, and by Sylvester's law of inertia a Cholesky factorization
    of `sym - c I` that succeeds proves `lambda_min > c` (`largest` is a Ritz value plus its residual: a
    bound, unless the random start missed the leading direction). With `c = rtol u + margin` this proves
    `lambda_min > rtol lambda_max`; the margin covers the backward error of the factorization,
    `(N + 2) eps(float64) tr(sym)` (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 10.3).

    Returns:
        The factor and `rtol u`, an upper bound of the absolute cut-off; or, when the proof does not succeed, a number
        of eigenvalues that are certainly above `rtol * lambda_max`: the side of the leading block up to which the
        factorization went, by Cauchy's interlacing.
    """
    n, trace = sym_NN.shape[-1], float(sym_NN.diagonal().double().sum())
    norms = torch.linalg.matrix_norm(sym_NN, "fro"), torch.linalg.matrix_norm(sym_NN, float("inf"))
    bound = rtol * 1.001 * min(*map(float, norms), largest)  # 0.1 %: the rounding of the norms themselves
    shift = bound + 4 * (n + 2) * torch.finfo(torch.float64).eps * trace
    if float(sym_NN.diagonal().min()) <= shift:  # lambda_min never exceeds a diagonal entry
        return 0
    for size in (n // LEADING_PART, n):  # nor the smallest eigenvalue of a leading block (Cauchy's interlacing)
        factorized = shifted_cholesky(sym_NN[:size, :size], -shift, torch.float64)[1]  # the factor is freed
        if factorized < size:
            return factorized
    factor, factorized = shifted_cholesky(sym_NN, 0.0, torch.float64)
    return n if factorized < n else (factor, bound)
