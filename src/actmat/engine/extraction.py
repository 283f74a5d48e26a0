"""Write the merged delta of one tensor as the factors of its best approximation, or measure one that is left out.

    D* = U diag(s) V^T,    B = U_r sqrt(s_r),  A = sqrt(s_r) V_r^T

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.observer import NoWriter, SinkSource
from actmat.errors import NumericalError
from actmat.linalg.lapack import retry_stats
from actmat.linalg.svd import thin_svd
from actmat.planning.model import Extraction, Item

__all__ = ["DeltaFactors"]

ROUNDING = 2.0**-40
"""Share of the energy that rounding may hide: the smallest rank that reaches the energy is not one more for it."""


class DeltaFactors:
    """Receives the merged delta of a tensor in row-major order; writes its factors at the end.

    Args:
        item: with its `extraction`.
        dtype: of the delta.
        writer: receives the factors.

    Attributes:
        hashes: content hash of every tensor that was written, after `finish`.
        stats: of the factors, after `finish`.
    """

    def __init__(self, item: Item, dtype: torch.dtype, writer: SinkSource) -> None:
        assert item.extraction is not None, "the plan extracts an adapter"
        self._item, self._form, self._writer = item, item.extraction, writer
        self._keeps = self._form.kind == "factored" and not isinstance(writer, NoWriter)
        self._delta = torch.zeros(item.numel if self._keeps else 0, dtype=dtype)
        self._square = 0.0
        self.hashes: dict[str, str] = {}
        self.stats: dict[str, Any] = {}

    def add(self, start: int, flat: Tensor, scale: float) -> None:
        """Take entries from `start` on; those that are never given are zeros."""
        flat = flat.reshape(-1)
        if self._keeps:
            here = self._delta[start : start + flat.numel()]
            here.copy_(flat)
            if scale != 1.0:
                here.mul_(scale)
            return
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) * scale
        self._square += norm * norm

    def finish(self) -> None:
        """Decompose and write.

        Raises:
            NumericalError: the factors are beyond the range of their dtype.
        """
        if not self._keeps:
            self.stats = {"norm": math.sqrt(self._square)}
            return
        rows, columns = reversed(self._item.shape) if self._form.transposed else self._item.shape
        delta_OI = self._delta.view(self._item.shape)
        delta_OI = delta_OI.mT.contiguous() if self._form.transposed else delta_OI
        norm = float(torch.linalg.vector_norm(delta_OI, dtype=torch.float64))
        self.stats = {"norm": norm}
        if not norm:
            return
        dtype = torch_dtype(self._item.out_dtype)
        b_OR, a_RI, self.stats = _factors(delta_OI.view(rows, columns), self._form, dtype)
        self._delta = torch.empty(0)
        for spec, tensor in zip(self._item.outputs, (a_RI, b_OR), strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise NumericalError(
                    f"tensor '{spec.name}' has values beyond {dtype}'s range; write with --dtype bfloat16 or float32"
                )
            sink = self._writer.sink(spec.name)
            sink.write(raw_bytes(tensor))
            self.hashes[spec.name] = sink.digest


def _factors(delta_OI: Tensor, form: Extraction, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """B and A in `dtype`; rank, energy and error, which is that of the rounded factors."""
    svd = thin_svd(delta_OI)
    squares = svd.s_K.square()
    total = float(squares.sum())
    rank = form.rank
    if rank is None:
        assert form.energy is not None, "one of the two is given"
        reached = squares.cumsum(0) >= form.energy * total * (1 - ROUNDING)
        rank = int(reached.int().argmax()) + 1 if bool(reached.any()) else len(squares)
    root_K = svd.s_K[:rank].sqrt()
    none = max(0, rank - len(root_K))  # zeros fill up: one rank for all layers is what loaders want
    b_OR = torch.nn.functional.pad(svd.u_OK[:, :rank] * root_K, (0, none)).to(dtype).contiguous()
    a_RI = torch.nn.functional.pad((svd.v_IK[:, :rank] * root_K).mT, (0, 0, 0, none)).to(dtype).contiguous()
    norm = float(torch.linalg.vector_norm(delta_OI, dtype=torch.float64))
    numerical, energy, retries = int(svd.rank), float(squares[:rank].sum()) / total, svd.retries
    del svd, squares
    left_OI = delta_OI.double()
    error = float(torch.linalg.vector_norm(left_OI.addmm_(b_OR.double(), a_RI.double(), alpha=-1.0)))
    return b_OR, a_RI, {
        "norm": norm,
        "rank": rank,
        "numerical_rank": numerical,
        "energy": energy,
        "error_norm": error,
        "relative_error": error / norm,
        **retry_stats(retries),
    }  # fmt: skip
