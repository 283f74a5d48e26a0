"""Kernel `extracted`: the merged delta of a tensor as the factors of its best approximation, or only its norm.

    D* = U diag(s) V^T,    B = U_r sqrt(s_r),  A = sqrt(s_r) V_r^T

The delta is merged by another kernel, as its reading says. Tensors that are saved whole are written as they are.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.engine.kernels import combine, dense, factored
from actmat.engine.observer import NoWriter
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.task import Record, Task
from actmat.engine.writing import Output, rounded, write_tensor
from actmat.linalg.lapack import retry_stats
from actmat.linalg.svd import thin_svd
from actmat.planning.item import Extraction
from actmat.planning.regions import Region


def run(tasks: Sequence[Task], reader: TensorReader) -> list[Record]:
    """Merge one tensor, and write its factors.

    Raises:
        NumericalError, RecipeError: from the method, or factors beyond the range of their dtype.
    """
    for task in tasks:
        form = task.item.extraction
        if form is not None and form.kind != "saved":
            task.output = DeltaFactors(task, form, reader.compute_dtype)
    if reader.reading is None:
        return factored.run(tasks, reader)
    inner = combine.run if reader.reading.strategy == "combine" else dense.run
    return inner(tasks, reader)


class DeltaFactors(Output):
    """Keeps the merged delta of a tensor; writes its factors at the end.

    Args:
        task, form: of an item that is extracted.
        dtype: of the delta.
    """

    def __init__(self, task: Task, form: Extraction, dtype: torch.dtype) -> None:
        super().__init__(task.item, task.writer)
        self._form = form
        self._keeps = self._form.kind == "factored" and not isinstance(task.writer, NoWriter)
        self._delta = torch.zeros(task.item.numel if self._keeps else 0, dtype=dtype)
        self._square = 0.0
        self._hashes: dict[str, str] = {}
        self._stats: dict[str, Any] = {}

    def take(self, region: Region, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader) -> None:
        """See `Output`; entries that are never given are zeros."""
        if delta is not None:
            self._add(region.start, delta)

    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor, reader: TensorReader) -> None:
        """See `Output`."""
        self._add(start, sum_S)

    def _add(self, start: int, flat: Tensor) -> None:
        self.sample.add(start, flat, self.scale)
        flat = flat.reshape(-1)
        if self._keeps:
            here = self._delta[start : start + flat.numel()]
            here.copy_(flat)
            if self.scale != 1.0:
                here.mul_(self.scale)
            return
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) * self.scale
        self._square += norm * norm

    def finish(self) -> Mapping[str, str]:
        """Decompose and write.

        Raises:
            NumericalError: the factors are beyond the range of their dtype.
        """
        item = self.item
        if not self._keeps:
            self._stats = {"norm": math.sqrt(self._square)}
            return {}
        rows, columns = reversed(item.shape) if self._form.transposed else item.shape
        delta_OI = self._delta.view(item.shape)
        delta_OI = delta_OI.mT.contiguous() if self._form.transposed else delta_OI
        norm = float(torch.linalg.vector_norm(delta_OI, dtype=torch.float64))
        self._stats = {"norm": norm}
        if norm:
            b_OR, a_RI, self._stats = _factors(delta_OI.view(rows, columns), self._form.rank, item.outputs)
            self._delta = torch.empty(0)
            pairs = zip(item.outputs, (a_RI, b_OR), strict=True)
            self._hashes = {spec.name: write_tensor(self.writer, spec, factor) for spec, factor in pairs}
        return self._hashes

    @property
    def digest(self) -> str:
        """See `Output`."""
        return hash_names(self._hashes.items())

    @property
    def stats(self) -> Mapping[str, Any]:
        """Norm, rank, energy and error."""
        return self._stats


def _factors(delta_OI: Tensor, rank: int, specs: Sequence[TensorSpec]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """B and A in the dtype of their specs (A, B); rank, energy and error, which is that of the rounded factors."""
    svd = thin_svd(delta_OI)
    squares = svd.s_K.square()
    total = float(squares.sum())
    root_K = svd.s_K[:rank].sqrt()
    none = max(0, rank - len(root_K))  # zeros fill up: one rank for all layers is what loaders want
    b_OR = rounded(specs[1], torch.nn.functional.pad(svd.u_OK[:, :rank] * root_K, (0, none)))
    a_RI = rounded(specs[0], torch.nn.functional.pad((svd.v_IK[:, :rank] * root_K).mT, (0, 0, 0, none)))
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
