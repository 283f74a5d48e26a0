"""Leading eigenpairs of a symmetric semidefinite matrix, where few are wanted: block Lanczos in float64.

    Q_JN: orthonormal basis of [X, S X, S^2 X, ..]      T = Q S Q^T = Y diag(t) Y^T      V = Y^T Q

`X` are `BLOCK` random vectors, the same for every matrix of one size. The basis grows block by block until all wanted
pairs have residuals `||S v - t v||` below the rounding of the matrix's own dtype. Every block is orthogonalized against
all before it, so that residuals are those of exact arithmetic.

**Few or many** is estimated from the first blocks: the squared components of the Ritz vectors in `X` are the weights of
a Gauss quadrature of the spectral density, so `N / BLOCK` times their sum over the values above a bound estimates how
many eigenvalues lie there, however few of them have been found; and where a number of pairs is wanted, the density
tells how large a basis they will take. Nothing depends on time or on the number of threads.

**Size of the basis.** A block of `B` random vectors meets `N` eigenvalues as one vector meets `N / B` of them: which
directions are exact depends on the shape of the spectrum and on the share of `N` that the basis has. So Lanczos'
iteration with a single vector, on `N / B` quantiles of the estimated spectrum, tells after which share the wanted pairs
are exact, for a ten-thousandth of the price (`basis_for`).

**None missed.** A Krylov space holds no more than `BLOCK` copies of a multiple eigenvalue. `none_above` proves that
nothing was missed; without a proof no result is returned.

Sources: G. Golub, C. Van Loan, "Matrix Computations", 4th ed., sections 10.1 to 10.3 (block Lanczos); G. Golub, G.
Meurant, "Matrices, Moments and Quadrature with Applications", 2010, chapters 4 and 11 (weights); A. Kuijlaars,
"Convergence analysis of Krylov subspace iterations with methods from potential theory", SIAM Review 48, 2006 (which
pairs are exact at which share).

Shapes: `N` side of the matrix, `J` size of the basis, `B` vectors of a block, `K` wanted pairs, `M = N / B` values that
stand for all, `D` steps. Vectors are rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.gram import add_gram
from actmat.linalg.lapack import eigh

SMALLEST = 2048
"""Side below which callers decompose all: there the first look is more than 3 % of a full decomposition."""

BLOCK = 24
"""Vectors of a block. Smaller blocks need a smaller basis, larger ones run closer to the speed of a square product."""

FIRST_LOOK = 7
"""Blocks after which the number of wanted eigenvalues is estimated: 3 % of a full decomposition at the smallest side,
less in larger ones, which is lost where many are wanted."""

EARLY_CHECK = 5
"""Blocks after which the attempt ends if no Ritz value lies at or below the bound yet. Where few are wanted, one does
after three or four: the smallest is below a third of the bound then, on power laws of which a fifth is wanted."""

LARGEST_LOOK = 24
"""Blocks for the largest eigenvalue alone: its residual is 5e-5 of it for products of random matrices, whose spectrum
has no gap at the edge (side 5632)."""

BASIS_PER_PAIR = 2.2
"""Size of the basis per wanted pair, on top of the blocks of the first look: measured on power laws. Other spectra take
more."""

SECOND_LOOK = 0.9
"""Share of the expected basis at which the second look is taken: an eighth more was seen, and as much less."""

WORTH = 0.5
"""Share of `N` up to which the expected basis is worth growing: it becomes up to an eighth larger than expected, and is
1.7 times as fast as a full decomposition at 0.56 of `N`, no faster at 0.6 (2048 x 2048, 2026-11-23)."""

LIMIT = 0.6
"""Share of `N` at which the basis is given up: about as slow as a full decomposition, and in no more memory."""

TINY = torch.finfo(torch.float64).tiny

ROUNDING = 1
"""Smallest tolerance of a residual, in eps(float64) of the largest eigenvalue."""

GROWTH = 1.25
"""Largest growth of the basis between two looks, each of which decomposes `T`."""

COPIES = 1.5
"""Estimated number of eigenvalues per exact Ritz value from which a multiple eigenvalue is taken to be incomplete."""

SEPARATED = 1e-6
"""Smallest gap, relative to the bound, in which the spectrum is cut for the proof, whose margin is some 1e-8."""

MARGIN = 4
"""Factor on the bounds of rounding."""

BLOCKS_MORE = 1.15
"""Need of a block above that of a single vector, for the same share, about (eleven spectra of side 2048,
2026-11-23)."""

SMALLEST_VALUE = 1e-18
"""Relative size below which eigenvalues are rounding; they take part as this."""

INDEPENDENT = 1e-4
"""Length of a new vector, relative to the largest entry of its block before, below which it is orthogonalized again."""


@dataclass(frozen=True, slots=True)
class Leading:
    """The wanted eigenvalues (ascending, float64) and their eigenvectors (columns)."""

    values_K: Tensor
    vectors_NK: Tensor


@dataclass(frozen=True, slots=True)
class _Ritz:
    """Ritz values (descending), their vectors in the basis (columns), residuals, estimated counts of eigenvalues."""

    values_J: Tensor
    coordinates_JJ: Tensor
    residuals_J: Tensor
    counts_J: Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """Eigenvalues above `floor` and above `share` times the largest: all of them, or the `most` largest of them.

    At least `known` exist. How large a basis all of them take was measured on power laws: their number is an estimate
    itself, so that more than that would be in vain.
    """

    share: float
    known: int = 0
    most: int | None = None
    floor: float = 0.0

    def of(self, values_J: Tensor) -> tuple[int, float]:
        """Number of these (descending) that are wanted, and the bound at or above which they lie."""
        lowest = self._lowest(values_J)
        above = int((values_J > lowest).sum())
        if self.most is None or above < self.most:
            return above, lowest
        return self.most, float(values_J[self.most - 1])

    def basis(self, ritz: _Ritz, dtype: torch.dtype, limit: float) -> tuple[float, float]:
        """Expected size of the basis (infinity above `limit`), and the size at which to look again."""
        lowest = self._lowest(ritz.values_J)
        is_above_J = ritz.values_J > lowest
        count, bound = float(ritz.counts_J[is_above_J].sum()), lowest
        if self.most is None:
            return _expected(max(count, int(is_above_J.sum()))), 1.3 * count
        if count >= self.most:
            count, bound = float(self.most), quantile(ritz.values_J, ritz.counts_J, self.most)
        expected = basis_for(ritz.values_J, ritz.counts_J, count, _tolerance(ritz, bound, dtype), BLOCK, limit)
        return expected, SECOND_LOOK * expected

    def _lowest(self, values_J: Tensor) -> float:
        return max(self.floor, self.share * float(values_J[0]))


class _Basis:
    """The Krylov basis, and `T`, the matrix in it (lower triangle)."""

    def __init__(self, sym_NN: Tensor, limit: int) -> None:
        size = sym_NN.shape[-1]
        self.sym_NN = sym_NN
        self.limit = limit
        self.size = 0
        self.rows_JN = sym_NN.new_empty(limit + BLOCK, size)
        self.t_JJ = sym_NN.new_zeros(BLOCK, BLOCK)
        start_NB = torch.randn(size, BLOCK, generator=torch.Generator().manual_seed(size), dtype=sym_NN.dtype)
        self.rows_JN[:BLOCK] = torch.linalg.qr(start_NB.to(sym_NN.device)).Q.mT

    def grow(self, size: int) -> None:
        """Extend the basis to at least this size, by whole blocks, within its limit."""
        size = min(-(-size // BLOCK) * BLOCK, self.limit)
        t_JJ = self.t_JJ.new_zeros(size + BLOCK, size + BLOCK)  # no larger: first touches of memory take time
        t_JJ[: len(self.t_JJ), : len(self.t_JJ)] = self.t_JJ
        self.t_JJ = t_JJ
        while self.size < size:
            self._extend()

    def _extend(self) -> None:
        """One more block: `S` times the last, orthogonal to all before it."""
        last, near = slice(self.size, self.size + BLOCK), slice(max(0, self.size - BLOCK), self.size + BLOCK)
        self.size = last.stop
        new_BN = self.rows_JN[last] @ self.sym_NN.mT
        largest = float(new_BN.abs().max())
        diagonal_BB = self._without(new_BN, near)[:, -BLOCK:] + self._without(new_BN, slice(0, last.stop))[:, -BLOCK:]
        self.t_JJ[last, last] = (diagonal_BB + diagonal_BB.mT) / 2
        q_NB, r_BB = torch.linalg.qr(new_BN.mT)
        next_BN = q_NB.mT.contiguous()
        if float(r_BB.diagonal().abs().min()) <= INDEPENDENT * largest:
            # some of the new vectors are rounding: made orthogonal again, they start the search in new directions
            for _ in range(2):
                self._without(next_BN, slice(0, last.stop))
                next_BN = torch.linalg.qr(next_BN.mT).Q.mT.contiguous()
        following = slice(last.stop, last.stop + BLOCK)
        self.rows_JN[following] = next_BN
        self.t_JJ[following, last] = next_BN @ new_BN.mT

    def _without(self, new_BN: Tensor, span: slice) -> Tensor:
        """Remove the components in these rows of the basis, in place; returns them, `B J`."""
        components_BJ = new_BN @ self.rows_JN[span].mT
        new_BN.addmm_(components_BJ, self.rows_JN[span], alpha=-1.0)
        return components_BJ

    def ritz(self) -> _Ritz:
        """The eigenpairs of `T`."""
        values_J, coordinates_JJ, _ = eigh(self.t_JJ[: self.size, : self.size])
        coordinates_JJ = coordinates_JJ.flip(-1)
        last_BJ = self.t_JJ[self.size : self.size + BLOCK, self.size - BLOCK : self.size] @ coordinates_JJ[-BLOCK:]
        counts_J = coordinates_JJ[:BLOCK].square().sum(0) * (self.sym_NN.shape[-1] / BLOCK)
        unit = float(values_J[-1].abs().clamp_min(TINY))  # squares of very small numbers would be zero
        residuals_J = torch.linalg.vector_norm(last_BJ / unit, dim=0) * unit
        return _Ritz(values_J.flip(-1), coordinates_JJ, residuals_J, counts_J)


def largest(sym_NN: Tensor) -> tuple[float, float]:
    """The largest eigenvalue of a float64 matrix, from below, and the residual of its vector."""
    basis = _Basis(sym_NN, LARGEST_LOOK * BLOCK)
    basis.grow(basis.limit)
    ritz = basis.ritz()
    return float(ritz.values_J[0]), float(ritz.residuals_J[0])


def leading(sym_NN: Tensor, wanted: Wanted, dtype: torch.dtype) -> Leading | None:
    """The wanted eigenpairs, proven to be all of them; None if that is not worth it, or not proven.

    Args:
        sym_NN: float64, symmetric, positive semidefinite up to rounding.
        dtype: of the entries from which `sym` was widened; residuals are below its rounding at the bound.
    """
    size = sym_NN.shape[-1]
    if _expected(wanted.known) > WORTH * size:
        return None
    basis = _Basis(sym_NN, int(LIMIT * size) // BLOCK * BLOCK)
    basis.grow(EARLY_CHECK * BLOCK)
    values_J = basis.ritz().values_J
    if wanted.most is None and wanted.of(values_J)[0] == len(values_J):
        return None  # all directions of a first look are kept
    look, before = FIRST_LOOK * BLOCK, None
    while True:
        basis.grow(look)
        ritz = basis.ritz()
        count, bound = wanted.of(ritz.values_J)
        tolerance, largest = _tolerance(ritz, bound, dtype), (WORTH if before is None else LIMIT) * size
        expected, next_look = wanted.basis(ritz, dtype, largest)
        if _is_vain(ritz, (count, bound), tolerance, expected, largest):
            return None
        if (cut := _cut(ritz, count, bound, tolerance)) is not None:
            break
        if basis.size == basis.limit:
            return None
        now = basis.size, math.log(max(float(ritz.residuals_J[:count].max()) / tolerance, 1.0))
        needed = math.inf if before is None else _needed(before, now)
        if before is not None and basis.size > expected and needed > basis.limit:
            return None  # residuals fall too slowly
        look = round(next_look if before is None else min(needed, GROWTH * basis.size))
        look, before = max(look, basis.size + BLOCK), now
    taken, level = cut
    vectors_KN = ritz.coordinates_JJ[:, :taken].mT @ basis.rows_JN[: basis.size]
    values_K = ritz.values_J[:taken]
    del basis, ritz  # their memory is that of the proof
    if not none_above(sym_NN, values_K, vectors_KN, level):
        return None
    return Leading(values_K[:count].flip(0), vectors_KN[:count].flip(0).mT)


def _tolerance(ritz: _Ritz, bound: float, dtype: torch.dtype) -> float:
    """Largest residual of a pair that counts as exact, where the smallest wanted value is at `bound`."""
    return max(torch.finfo(dtype).eps * bound, ROUNDING * torch.finfo(torch.float64).eps * float(ritz.values_J[0]))


def _is_vain(ritz: _Ritz, wanted: tuple[int, float], tolerance: float, expected: float, largest: float) -> bool:
    """True if a Krylov basis is not worth growing; `largest`: the size up to which it is."""
    count, bound = wanted
    if count == 0 or expected > largest:
        return True
    # below this level `none_above` proves nothing, whatever the matrix: the rounding of `K` pairs of this trace
    provable = MARGIN * torch.finfo(torch.float64).eps * (count + 2) * 2 * float(ritz.values_J[:count].sum())
    if count < len(ritz.values_J) and 2 * provable > bound:  # else the bound is not the last one's
        return True
    exact = ritz.residuals_J[:count] <= tolerance
    pairs, estimate = int(exact.sum()), float(ritz.counts_J[:count][exact].sum())
    return estimate > COPIES * pairs + BLOCK  # a multiple eigenvalue has more directions than a block


def _cut(ritz: _Ritz, count: int, bound: float, tolerance: float) -> tuple[int, float] | None:
    """Number of pairs to take and a level between them and the rest, or None if some are not exact yet.

    Where eigenvalues crowd at the bound, all of the crowd is taken, so that the proof needs no level inside it.
    """
    values_J, residuals_J = ritz.values_J, ritz.residuals_J
    exact = int((residuals_J <= tolerance).int().cumprod(0).sum())  # the leading ones
    for taken in range(count, min(exact, len(values_J) - 1) + 1):
        above, below = min(bound, float(values_J[taken - 1])), float(values_J[taken] + residuals_J[taken])
        if above - below > SEPARATED * bound:
            return taken, (above + below) / 2
    return None


def _expected(estimate: float) -> float:
    """Size of the basis that this many wanted pairs usually need."""
    return BASIS_PER_PAIR * estimate + FIRST_LOOK * BLOCK


def _needed(before: tuple[int, float], now: tuple[int, float]) -> float:
    """Size at which the logarithm of the largest residual is zero, by the line through two sizes."""
    slope = (before[1] - now[1]) / (now[0] - before[0])
    return now[0] + now[1] / slope if slope > 0 else math.inf


def none_above(sym_NN: Tensor, values_K: Tensor, vectors_KN: Tensor, level: float) -> bool:
    """True if it is proven that at most `K` eigenvalues of `sym` are at or above `level`; False proves nothing.

    `M = sym - V^T diag(l) V`, with `l >= 0`, differs from `sym` by a positive semidefinite matrix of rank `K`, so that
    the eigenvalue `K + 1` of `sym` is at most the largest of `M` (Weyl), whatever the vectors are. By Sylvester's law
    of inertia, a Cholesky factorization of `(level - margin) I - M` that succeeds proves that all of these are below
    the level. The margin covers the backward error of the factorization, `(N + 2) eps tr(level I - M)`, and the
    rounding of the products, `(K + 2) eps (tr(sym) + tr(V^T diag(l) V))` (N. Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, theorem 10.3 and section 3.5).

    Args:
        sym_NN: float64, positive semidefinite up to rounding.
        vectors_KN: rows.

    >>> sym = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    >>> largest, its_vector = torch.tensor([4.0]).double(), torch.eye(3, dtype=torch.float64)[:1]
    >>> none_above(sym, largest, its_vector, 2.1), none_above(sym, largest, its_vector, 1.9)
    (True, False)
    """
    size, eps = sym_NN.shape[-1], torch.finfo(torch.float64).eps
    kept_K = values_K.clamp_min(0)
    left_NN = sym_NN.neg()
    add_gram(left_NN, vectors_KN * kept_K.sqrt().unsqueeze(-1))
    summed = float(sym_NN.diagonal().sum()) + float((vectors_KN.square().sum(-1) * kept_K).sum())
    trace = size * level + float(left_NN.diagonal().sum().clamp_min(0))
    margin = MARGIN * eps * ((size + 2) * trace + (len(kept_K) + 2) * summed)
    left_NN.diagonal().add_(level - margin)
    return int(torch.linalg.cholesky_ex(left_NN, upper=True).info) == 0


def basis_for(values_J: Tensor, counts_J: Tensor, wanted: float, tolerance: float, block: int, limit: float) -> float:
    """Vectors after which the `wanted` leading pairs have residuals below `tolerance`; infinity if above `limit`.

    Args:
        values_J: Ritz values, descending.
        counts_J: number of eigenvalues that each stands for; their sum is the side of the matrix.

    >>> falling, side = torch.logspace(0, -8, 60, dtype=torch.float64), 600.0
    >>> alike = torch.full((60,), 10.0, dtype=torch.float64)
    >>> 120 < basis_for(falling, alike, 60, 1e-6, 10, side) < 240
    True
    """
    size = float(counts_J.sum())
    if wanted <= 0 or float(values_J[0]) <= 0:
        return 0.0
    values_M = _quantiles(values_J, counts_J, max(1, round(size / block)))
    first = math.ceil(wanted / block)
    last = min(len(values_M), math.floor(limit / (BLOCKS_MORE * block)))
    if first > last:
        return math.inf
    t_DD = _lanczos(values_M, last)
    for steps in range(first, last + 1):
        _, vectors = torch.linalg.eigh(t_DD[:steps, :steps])
        residuals = t_DD[steps, steps - 1].abs() * vectors[-1, -first:].abs()
        if float(residuals.max()) <= tolerance:
            return BLOCKS_MORE * steps * block
    return math.inf


def quantile(values_J: Tensor, counts_J: Tensor, rank: float) -> float:
    """Estimate of the eigenvalue of this rank, counted from the largest."""
    return float(_at(values_J, counts_J, torch.tensor([rank], dtype=torch.float64)))


def _quantiles(values_J: Tensor, counts_J: Tensor, count: int) -> Tensor:
    """`count` values that stand for equal shares of the spectrum."""
    return _at(values_J, counts_J, (torch.arange(count, dtype=torch.float64) + 0.5) * (float(counts_J.sum()) / count))


def _at(values_J: Tensor, counts_J: Tensor, at_M: Tensor) -> Tensor:
    """Eigenvalues at these ranks, by interpolation of the logarithms."""
    values_J, counts_J = values_J.cpu(), counts_J.cpu()
    middles_J = counts_J.cumsum(0) - counts_J / 2
    after_M = torch.searchsorted(middles_J, at_M).clamp(1, max(1, len(middles_J) - 1))
    share_M = ((at_M - middles_J[after_M - 1]) / (middles_J[after_M] - middles_J[after_M - 1])).clamp(0, 1)
    logs_J = values_J.clamp_min(SMALLEST_VALUE * float(values_J[0])).log()
    return torch.lerp(logs_J[after_M - 1], logs_J[after_M], share_M).exp()


def _lanczos(values_M: Tensor, steps: int) -> Tensor:
    """The tridiagonal matrix, `steps + 1` on a side, of the diagonal matrix of these and a vector of ones."""
    size = len(values_M)
    t_DD = values_M.new_zeros(steps + 1, steps + 1)
    basis_DM = values_M.new_zeros(steps + 1, size)
    basis_DM[0] = 1 / math.sqrt(size)
    for step in range(steps):
        new_M = values_M * basis_DM[step]
        t_DD[step, step] = new_M @ basis_DM[step]
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            new_M = new_M - (basis_DM[: step + 1] @ new_M) @ basis_DM[: step + 1]
        length = torch.linalg.vector_norm(new_M)
        t_DD[step, step + 1] = t_DD[step + 1, step] = length
        if float(length) > 0:
            basis_DM[step + 1] = new_M / length
    return t_DD
