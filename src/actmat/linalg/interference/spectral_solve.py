"""`D* = N + (left - N right^T) G right`, with `G = V (f(l)/l) V^T`, for one reduced problem.

The gain `G` is applied in the cheapest exact way:

* Cholesky instead of eigenvectors for a ridge, and for a hard cut-off that is proven to remove nothing;
* `(X V g) V^T` or `X (V g V^T)`, whichever has fewer products, with only the kept columns of `V`;
* in panels of rows, so that the result can overwrite the numerator.

Shapes: `O` out_features, `I` in_features, `N` side of the reduced Gram matrix, `K` kept directions,
`X` rows of a panel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actmat.linalg.cholesky import certified_cholesky, shifted_cholesky
from actmat.linalg.interference.filters import Filter, gain
from actmat.linalg.interference.moments import Reduced, Spectrum
from actmat.linalg.lapack import Retries

__all__ = ["Stats", "solve"]

Stats = dict[str, float | int | str | bool]
Apply = Callable[[Tensor], Tensor]
"""`X N -> X N`: right-multiplication by `G`."""

FLOAT32_CONDITION = 1e5
"""Largest condition number at which a ridge system is factorised in float32; beyond it, float64."""

PANEL_ROWS = 1024
"""Rows of a panel: enough for the products to run at full speed."""


def solve(
    reduced: Reduced,
    spectral: Filter,
    width: int,
    out_OI: Tensor,
    fill_OI: tuple[Tensor, float] | None,
    allow_cholesky: bool,
) -> tuple[Stats, Retries]:
    """Write `D*` to `out_OI` (which may be the primal `left_ON` of the problem); return the record and the retries.

    Args:
        reduced: the accumulated problem.
        spectral: filter.
        width: in_features `I` of the layer, for the default cut-off and the mean eigenvalue.
        out_OI: receives the result.
        fill_OI: `(X, a)` for `N = a X`, or None for `N = 0`.
        allow_cholesky: let a solve replace the eigendecomposition where both give the same answer.
    """
    trace = reduced.trace()
    if trace == 0.0:  # no expert moved: the filter keeps no direction
        if fill_OI is None:
            out_OI.zero_()
        else:
            torch.mul(fill_OI[0], fill_OI[1], out=out_OI)
        return {"rank": 0, "solver": f"{reduced.form}/none"}, ()
    rtol = spectral.resolved_rtol(reduced.size, width, reduced.left_ON.dtype)
    retries: Retries = ()
    found = _by_cholesky(reduced, spectral, rtol, trace / width) if allow_cholesky else None
    if found is None:
        found, retries = _by_spectrum(reduced, spectral, rtol, trace / width), reduced.spectrum().retries
    apply, stats = found
    _apply_in_panels(reduced, apply, out_OI, fill_OI)
    return stats, retries


def _by_cholesky(reduced: Reduced, spectral: Filter, rtol: float, mean: float) -> tuple[Apply, Stats] | None:
    """Gain by a triangular solve; None where the spectrum is needed."""
    if reduced.gram_NN is None:
        return None
    if spectral.kind == "tikhonov":
        return _ridge(reduced, reduced.gram_NN, spectral.ridge * mean)
    if spectral.kind == "hard" and not reduced.has_spectrum:
        certified = certified_cholesky(reduced.gram_NN, rtol)
        if certified is not None:
            factor, cutoff = certified
            stats: Stats = {"rank": reduced.size, "cutoff": cutoff, "rtol": rtol}
            return _solver(factor, reduced), stats | {"solver": f"{reduced.form}/cholesky"}
    return None


def _ridge(reduced: Reduced, gram_NN: Tensor, ridge: float) -> tuple[Apply, Stats] | None:
    """`G = (gram + ridge I)^-1`, factorised in float64 where float32 would lose the ridge in its rounding."""
    condition = float(torch.linalg.matrix_norm(gram_NN, "fro")) / ridge
    dtype = gram_NN.dtype if condition < FLOAT32_CONDITION else torch.float64
    factor = shifted_cholesky(gram_NN, ridge, dtype)
    if factor is None:
        return None
    return _solver(factor, reduced), {"ridge": ridge, "solver": f"{reduced.form}/cholesky"}


def _solver(factor_NN: Tensor, reduced: Reduced) -> Apply:
    """Two triangular solves per panel, or the inverse once where there are more rows than columns."""
    dtype = reduced.left_ON.dtype
    if reduced.left_ON.shape[-2] > reduced.size:
        inverse = torch.cholesky_inverse(factor_NN).to(dtype)
        return lambda left_XN: left_XN @ inverse
    return lambda left_XN: torch.cholesky_solve(left_XN.to(factor_NN.dtype).mT, factor_NN).mT.to(dtype)


def _by_spectrum(reduced: Reduced, spectral: Filter, rtol: float, mean: float) -> tuple[Apply, Stats]:
    spectrum = reduced.spectrum()
    found = gain(spectrum.values_N, spectral, rtol=rtol, mean=mean)
    name = "svd" if spectrum.vectors_NN is None else "eigh"
    stats: Stats = {**found.stats, "solver": f"{reduced.form}/{name}"}
    return _gain_applier(spectrum, found.gain_K, reduced.left_ON.shape[-2]), stats


def _gain_applier(spectrum: Spectrum, gain_K: Tensor, rows: int) -> Apply:
    size, kept = spectrum.values_N.numel(), gain_K.numel()
    if spectrum.vectors_NN is None:
        full = torch.cat([gain_K.new_zeros(size - kept), gain_K])
        return lambda left_XN: left_XN * full
    vectors = spectrum.vectors_NN[:, size - kept :]
    scaled = vectors * gain_K.to(vectors.dtype)
    # forming the product costs N^2 K and then O N^2; keeping it in two factors costs 2 O N K
    if size * size * kept + rows * size * size < 2 * rows * size * kept:
        product = scaled @ vectors.mT
        return lambda left_XN: left_XN @ product
    return lambda left_XN: (left_XN @ scaled) @ vectors.mT


def _apply_in_panels(reduced: Reduced, apply: Apply, out_OI: Tensor, fill_OI: tuple[Tensor, float] | None) -> None:
    """Apply the gain panel by panel: rows are independent, and a panel is read before its result overwrites it."""
    rows = out_OI.shape[-2]
    for start in range(0, rows, PANEL_ROWS):
        here = slice(start, min(start + PANEL_ROWS, rows))
        left = reduced.left_ON[here]
        if fill_OI is not None:
            fill, scale = fill_OI
            to_left = reduced.gram_NN if reduced.right_NI is None else reduced.right_NI.mT
            assert to_left is not None, "the primal form keeps its Gram matrix"
            left = torch.addmm(left, fill[here], to_left, alpha=-scale)
        value = apply(left)
        if reduced.right_NI is not None:
            value = value @ reduced.right_NI
        if fill_OI is not None:
            value = torch.add(value, fill_OI[0][here], alpha=fill_OI[1])
        out_OI[here] = value
