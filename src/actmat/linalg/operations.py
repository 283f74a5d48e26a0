"""Operations of matrix routines by class, from shapes: the FLOPs of a plan, from which units are ordered.

Counts are leading terms with their constants; for decompositions, whose work depends on the spectrum, they are the
usual nominal counts.

    product    2 M N K of an `M x K` by `K x N` product
    cholesky   N^3 / 3 of a factorization, N^2 per right-hand side and triangle, 2 N^3 / 3 of an inverse from it
    eigh       9 N^3 of a symmetric eigendecomposition with vectors
    svd        6 M N^2 + 20 N^3 of a thin singular value decomposition, M >= N
    entry      1 per entry and pass of an elementwise operation

Source of the counts: G. Golub, C. Van Loan, "Matrix Computations", 4th ed., sections 1.1, 4.2, 8.3 and 8.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from actmat.linalg.gram import gram_panels
from actmat.linalg.krylov import planned_basis

OperationKind = Literal["product", "cholesky", "eigh", "svd", "entry"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A number of operations of one class."""

    kind: OperationKind
    flops: int


def product(rows: int, columns: int, inner: int) -> Operation:
    """An `M x K` by `K x N` product."""
    return Operation("product", 2 * rows * columns * inner)


def gram(rows: int, width: int) -> Operation:
    """`A^T A` of an `M x N` factor in the blocks on and above the diagonal only.

    >>> gram(100, 400).flops == 2 * 100 * 400 * 400, gram(100, 800).flops == 2 * 100 * 800 * 800 * 5 // 8
    (True, True)
    """
    upper = sum((c.stop - c.start) * (width - c.start) for c in gram_panels(width))
    return Operation("product", 2 * rows * upper)


def cholesky(size: int, *, inverse: bool = False) -> Operation:
    """Factorization of a symmetric `N x N` matrix, with its inverse if requested."""
    return Operation("cholesky", size**3 // 3 + (2 * size**3 // 3 if inverse else 0))


def cholesky_solve(size: int, right_hand_sides: int) -> Operation:
    """Two triangular solves with `M` right-hand sides."""
    return Operation("cholesky", 2 * right_hand_sides * size**2)


def eigh(size: int) -> Operation:
    """All eigenvalues and eigenvectors of a symmetric matrix."""
    return Operation("eigh", 9 * size**3)


def leading_eigh(size: int, wanted: int) -> list[Operation]:
    """The largest eigenvalues of a semidefinite matrix and their vectors: by a part where a falling spectrum allows it.

    The basis and its orthogonality, its eigenvectors, those wanted, and the proof that none is missed: `linalg.krylov`.

    >>> [o.kind for o in leading_eigh(4096, 3000)], total(leading_eigh(4096, 300)) < total(leading_eigh(4096, 3000)) / 2
    (['eigh'], True)
    """
    basis = planned_basis(size, wanted)
    if not basis:
        return [eigh(size)]
    grown = [product(size, basis, size), product(size, basis, basis)]
    found = [eigh(basis), product(size, wanted, basis)]
    return [*grown, *found, gram(wanted, size), cholesky(size)]


def svd(rows: int, columns: int) -> Operation:
    """All `min(M, N)` singular triplets by LAPACK."""
    short, long = sorted((rows, columns))
    return Operation("svd", 6 * long * short**2 + 20 * short**3)


def entries(count: int) -> Operation:
    """Entries of all passes of elementwise operations."""
    return Operation("entry", count)


def thin_svd(rows: int, columns: int, kept: int, *, double: bool) -> list[Operation]:
    """`linalg.svd.thin_svd`: through the short side's Gram matrix in float64, or by LAPACK for float64 accuracy."""
    short, long = sorted((rows, columns))
    if double:
        return [svd(rows, columns)]
    gram_and_long = [gram(long, short), product(long, kept, short)]
    return [*gram_and_long, *leading_eigh(short, kept), entries(4 * rows * columns)]


def polar_factor(rows: int, columns: int, *, double: bool) -> list[Operation]:
    """`linalg.singular.polar_factor`: through the short side's Gram matrix, or by LAPACK for float64 accuracy."""
    short, long = sorted((rows, columns))
    if double:
        return [svd(rows, columns), product(rows, columns, short)]
    both = [gram(long, short), product(short, long, short)]
    return [*both, product(short, short, short), eigh(short), entries(2 * rows * columns)]


def repeated(operations: Iterable[Operation], count: int) -> list[Operation]:
    """The same operations `count` times."""
    return [replace(o, flops=o.flops * count) for o in operations]


def total(operations: Iterable[Operation]) -> int:
    """Sum over all classes."""
    return sum(o.flops for o in operations)
