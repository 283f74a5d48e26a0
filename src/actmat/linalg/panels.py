"""Independent panels of one computation, which workers without a unit of their own may share.

The panels follow from the shape only. Each is computed by one thread with the same calls on the same memory, so the
result is the same whoever computes it, and in whatever order. Without helpers the caller computes all of them.

Of a symmetric Gram matrix, only blocks on and above the diagonal are computed; the others are copied.

Shapes: `O` rows, `I` columns of a matrix, `N` inner size of a product; `R` rows and `I` columns of a factor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

SPLIT_ENTRIES = 1 << 22
"""Entries `O x I` from which a product is computed in panels of rows: 2048 x 2048. Smaller ones take less than a tenth
of a second, and keep the bytes that one call gives. Panels left the bytes of merged deltas
of 3072 x 2048 and 1600 x 4608 unchanged (2026-11-22)."""

PANEL_ROWS = 512
"""Rows of a panel of a split product: enough for a product to run at full speed, with the other factor packed anew for
each panel."""

PANELLED_FROM = 512
"""Smallest side at which a symmetric product is cut into column panels (below, calls cost more than they save)."""

GRAM_COLUMNS = 256
"""Columns of a panel of a symmetric product, of which there are four at least: half of a diagonal block is computed in
vain, and narrower panels run further below full speed."""


class Helpers(Protocol):
    """Threads that may take panels."""

    def share(self, panels: Sequence[Callable[[], None]], nbytes: int) -> None:
        """Run all panels, on this thread and on others; return when all are done. Errors are raised."""


_local = threading.local()


@contextlib.contextmanager
def helped_by(helpers: Helpers) -> Iterator[None]:
    """Panels of computations on this thread are shared with these helpers."""
    _local.helpers = helpers
    try:
        yield
    finally:
        _local.helpers = None


def run_panels(work: Callable[[slice], None], panels: Sequence[slice], nbytes: int = 0) -> None:
    """`work(panel)` for every panel; they must write to different memory.

    Args:
        nbytes: memory that one panel takes while it is computed.

    >>> done = []
    >>> run_panels(done.append, row_panels(1030, 4096))
    >>> done
    [slice(0, 512, None), slice(512, 1024, None), slice(1024, 1030, None)]
    """
    helpers: Helpers | None = getattr(_local, "helpers", None)
    if helpers is None or len(panels) == 1:
        for panel in panels:
            work(panel)
    else:
        helpers.share([partial(work, panel) for panel in panels], nbytes)


def row_panels(rows: int, width: int) -> list[slice]:
    """Rows of an `O x I` matrix in panels, or all rows where the matrix is small."""
    step = PANEL_ROWS if rows * width >= SPLIT_ENTRIES else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def gram_panels(width: int) -> list[slice]:
    """Columns of a symmetric `I x I` matrix in panels; each is computed from its diagonal block to the right."""
    count = 1 if width < PANELLED_FROM else max(4, width // GRAM_COLUMNS)
    return [slice(*cut) for cut in pairwise(width * i // count for i in range(count + 1))]


def multiply(left_ON: Tensor, right_NI: Tensor, out_OI: Tensor | None = None, *, alpha: float = 1.0) -> Tensor:
    """`left right` in panels of rows; added to `out`, `alpha` times, where that is given."""
    made_OI = left_ON.new_empty(left_ON.shape[0], right_NI.shape[1]) if out_OI is None else out_OI

    def one(own: slice) -> None:
        if out_OI is None:
            torch.mm(left_ON[own], right_NI, out=made_OI[own])
        else:
            made_OI[own].addmm_(left_ON[own], right_NI, alpha=alpha)

    run_panels(one, row_panels(*left_ON.shape))
    return made_OI


def add_gram(out_II: Tensor, a_RI: Tensor, alpha: float = 1.0) -> None:
    """`out += alpha A^T A` in the blocks on and above the diagonal only; `mirror` fills the rest.

    With four column panels this is 5/8 of the full product, with 22 of them 23/44.

    >>> import torch
    >>> out = torch.zeros(2, 2)
    >>> add_gram(out, torch.tensor([[1.0, 2.0]]))
    >>> out.tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """

    def add(own: slice) -> None:
        out_II[own, own.start :].addmm_(a_RI[:, own].mT, a_RI[:, own.start :], alpha=alpha)

    run_panels(add, gram_panels(out_II.shape[-1]))


def mirror(gram_II: Tensor) -> None:
    """Copy the blocks above the diagonal to below it."""

    def copy(own: slice) -> None:
        gram_II[own.stop :, own] = gram_II[own, own.stop :].mT

    run_panels(copy, gram_panels(gram_II.shape[-1]))
