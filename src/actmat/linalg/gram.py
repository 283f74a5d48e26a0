"""Gram matrices, symmetric: only blocks on and above the diagonal are computed, the others copied.

Shapes: `R` rows and `I` columns of a factor, `N` any number of columns.
"""

from __future__ import annotations

from torch import Tensor

from actmat.linalg.panels import gram_panels, run_panels

__all__ = ["add_gram", "mirror"]


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
