"""Sinks write merged values: they round once, check range, sign and finiteness, and hash.

    Sum        W_0 + scale * D*, chunk by chunk
    Factors    A = a, B = scale * b of a module that was merged by its factors, cut or padded to the planned rank;
               of a sum that has this rank, the experts' factors as they are
    Svd        B = U_r sqrt(s_r), A = sqrt(s_r) V_r^T of a delta that was merged whole, D* = U diag(s) V^T

Shapes: `O` out_features, `I` in_features, `R` rank, `S` entries of a chunk. Factors are computed in float64.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.deltas import RegionDeltas
from actmat.engine.observer import ByteSink, Writer
from actmat.engine.reader import BaseEntries, ItemReader
from actmat.engine.record import Record
from actmat.engine.size import Sample, products_of
from actmat.engine.task import Task
from actmat.errors import NumericalError
from actmat.layout.classify import is_variance
from actmat.linalg.inner import is_finite
from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, Truncated, inner_products, padded, truncate, truncate_dense
from actmat.linalg.svd import thin_svd
from actmat.planning.item import Item, ModuleForm
from actmat.planning.regions import CHUNK, Region
from actmat.planning.writes import ALPHA


def rounded(spec: TensorSpec, value: Tensor) -> Tensor:
    """A whole tensor in the dtype of its spec.

    Raises:
        NumericalError: NaN, Inf, or values beyond the range of the dtype.
    """
    dtype = torch_dtype(spec.dtype)
    out = value.to(dtype).contiguous()
    if not is_finite(out):
        raise NumericalError(
            f"tensor '{spec.name}' has values beyond {dtype}'s range; write with --dtype bfloat16 or float32"
            if is_finite(value)
            else f"tensor '{spec.name}' has NaN or Inf, but its factors are finite. Likely cause: options out of "
            "proportion to the deltas; try other options, or another method for this module"
        )
    return out


def write_tensor(writer: Writer | None, spec: TensorSpec, value: Tensor) -> str:
    """Round and write a whole tensor; returns its content hash, empty where nothing is written.

    Raises:
        NumericalError: see `rounded`.
    """
    data = raw_bytes(rounded(spec, value))
    if writer is None:
        return ""
    sink = writer.sink(spec.name)
    sink.write(data)
    return sink.digest


class Sink(abc.ABC):
    """Receives the merged delta of one item, region by region in storage order.

    Attributes:
        sample: sampled entries of the merged delta, see `engine.size`.
    """

    def __init__(self, task: Task, reader: ItemReader) -> None:
        self.task, self.item, self.writer, self.reader = task, task.item, task.writer, reader
        self.scale = self.item.call.scale if self.item.call is not None else 1.0
        self.sample = Sample(self.item.numel)

    @abc.abstractmethod
    def take(
        self, region: Region, base: BaseEntries | None, value: Tensor | LowRank | None, deltas: RegionDeltas | None
    ) -> None:
        """Take the merged delta of a region before its scale: flat, or as factors; None: nothing changed there.

        Args:
            base: the region's entries as stored, flat; None without a base.
            deltas: of the experts; None for a copy.
        """

    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor) -> None:
        """Take the merged delta of a chunk from entry `start` on, which may be overwritten.

        Args:
            base_S: the base there in the compute dtype; `stored_S`: as stored.
        """
        raise NotImplementedError(f"{type(self).__name__} takes whole regions")

    @abc.abstractmethod
    def finish(self) -> Record:
        """Write the rest, once all regions were given; returns what the sink knows of the item's record.

        Raises:
            NumericalError: values that the output dtype does not hold.
        """


class Sum(Sink):
    """Writes `W_0 + scale * D*` in the output dtype; without a delta, the base's bits."""

    def __init__(self, task: Task, reader: ItemReader) -> None:
        super().__init__(task, reader)
        self._names = tuple(s.name for s in self.item.outputs)

    @cached_property
    def _bytes(self) -> ByteSink | None:
        """Receives the bytes of the tensor, and of those tied to it; None if the merge is only measured."""
        return None if self.writer is None else self.writer.sink(self._names[0], self._names[1:])

    def take(
        self, region: Region, base: BaseEntries | None, value: Tensor | LowRank | None, deltas: RegionDeltas | None
    ) -> None:
        """See `Sink`."""
        assert base is not None, "a sum has a base"
        if value is None:
            for low in range(0, base.numel(), CHUNK):
                chunk = base[low : low + CHUNK]
                self._write(chunk, chunk)
            return
        assert isinstance(value, Tensor), "a sum is dense"
        self.sample.add(region.start, value, self.scale)
        low = 0
        for chunk in self.reader.merged_chunks(region, base, value, self.scale):
            self._write(chunk, base[low : low + chunk.numel()])
            low += chunk.numel()

    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor) -> None:
        """See `Sink`."""
        if start + sum_S.numel() > self.sample.wanted_from:
            self.sample.add(start, sum_S, self.scale)
        self._write(torch.add(base_S, sum_S, alpha=self.scale, out=sum_S), stored_S)

    def finish(self) -> Record:
        """See `Sink`."""
        digest = "" if self._bytes is None else self._bytes.digest
        return Record(self.item.name, digest, dict.fromkeys(self._names, digest))

    def _write(self, chunk: Tensor, stored: Tensor) -> None:
        """Cast, check and write one chunk of merged entries; `stored`: the same of the base, as stored.

        Raises:
            NumericalError: from `check_range` and `check_sign`.
        """
        out_dtype = torch_dtype(self.item.out_dtype)
        cast = chunk
        if chunk.dtype != out_dtype:
            cast = self.reader.scratch.take("cast", chunk.numel(), out_dtype).copy_(chunk)
        # a sum is finite only if every entry is (or it overflows): one pass in the cache, an exact one only then
        if out_dtype.is_floating_point and not math.isfinite(float(cast.sum())):
            check_range(self.item, chunk, cast, stored)
        if is_variance(self.item.name):
            check_sign(self.item, cast, stored)
        if self._bytes is not None:
            self._bytes.write(raw_bytes(cast))


class Factors(Sink):
    """Writes the merged delta of a module as factors, with the merged addition to its layer's bias."""

    def take(
        self, region: Region, base: BaseEntries | None, value: Tensor | LowRank | None, deltas: RegionDeltas | None
    ) -> None:
        """See `Sink`; a module is one region."""
        assert value is not None, "a module is never copied"
        assert deltas is not None, "a module is never copied"
        self._experts, rank = deltas.whole_factors, self.item.write.rank
        if isinstance(value, Tensor):
            scaled_OI = value if self.scale == 1 else value.to(torch.float64) * self.scale
            self._truncated = truncate_dense(scaled_OI, rank)
            return
        scaled = LowRank(value.b_OR * self.scale, value.a_RI)
        call, acts_on = self.task.call, self.task.method.acts_on
        is_sum = self.item.is_factored and acts_on == "elementwise" and call.space == "full" and not call.post
        self._truncated = padded(scaled, rank) if is_sum and scaled.rank <= rank else truncate(scaled, rank)

    def finish(self) -> Record:
        """See `Sink`."""
        gram_TT = inner_products(self._experts)
        stats = _norms(gram_TT, self._truncated)
        values = list(_stored(self.item.module, self._truncated.value))
        for spec in self.item.outputs[len(values) :]:
            is_scale = spec.name.endswith(ALPHA)
            rank = torch.tensor(float(self.item.write.rank), dtype=torch.float64)
            values.append(rank if is_scale else _bias(self.item, self.reader))
        hashes = write_tensors(self.writer, self.item.outputs, values)
        return Record(
            self.item.name,
            hash_names(hashes.items()),
            hashes,
            stats=stats,
            unchanged=not any(stats["expert_norms"]),
            products=products_of(gram_TT),
        )


class Svd(Sink):
    """Keeps the merged delta of a tensor, and writes the factors of its best approximation; or keeps its norm only."""

    def __init__(self, task: Task, reader: ItemReader) -> None:
        super().__init__(task, reader)
        self._keeps = self.item.write.kind == "svd" and self.writer is not None
        self._delta = torch.zeros(self.item.numel if self._keeps else 0, dtype=reader.compute_dtype)
        self._square = 0.0

    def take(
        self, region: Region, base: BaseEntries | None, value: Tensor | LowRank | None, deltas: RegionDeltas | None
    ) -> None:
        """See `Sink`; entries that are never given are zeros."""
        if value is not None:
            assert isinstance(value, Tensor), "the delta of a tensor is dense"
            self._add(region.start, value)

    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor) -> None:
        """See `Sink`."""
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

    def finish(self) -> Record:
        """See `Sink`."""
        hashes: dict[str, str] = {}
        stats: dict[str, Any] = {"norm": math.sqrt(self._square)}
        if self._keeps:
            delta_OI = self._delta.view(self.item.shape)
            delta_OI = delta_OI.mT.contiguous() if self.item.layout.orientation == "IO" else delta_OI
            stats = {"norm": float(torch.linalg.vector_norm(delta_OI, dtype=torch.float64))}
            if stats["norm"]:
                b_OR, a_RI, stats = _decomposed(delta_OI, self.item.write.rank, self.item.outputs)
                self._delta = torch.empty(0)
                hashes = write_tensors(self.writer, self.item.outputs, (a_RI, b_OR))
        return Record(self.item.name, hash_names(hashes.items()), hashes, stats=stats)


def sink_of(task: Task, reader: ItemReader) -> Sink:
    """The sink that writes a task's item."""
    kind = task.item.write.kind
    return {"sum": Sum, "factors": Factors}.get(kind, Svd)(task, reader)


def write_tensors(writer: Writer | None, specs: Sequence[TensorSpec], values: Sequence[Tensor]) -> dict[str, str]:
    """Round and write whole tensors; returns their content hashes.

    Raises:
        NumericalError: see `rounded`.
    """
    return {spec.name: write_tensor(writer, spec, value) for spec, value in zip(specs, values, strict=True)}


def _decomposed(delta_OI: Tensor, rank: int, specs: Sequence[TensorSpec]) -> tuple[Tensor, Tensor, dict[str, Any]]:
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


def _stored(form: ModuleForm, value: LowRank) -> tuple[Tensor, Tensor]:
    """A and B as PEFT stores them, see `experts.lora.modules`."""
    if form.kind == "embedding":
        return value.b_OR.mT, value.a_RI.mT
    if form.kind == "convolution":
        ones = (1,) * (len(form.kernel) - 1)
        return value.a_RI.reshape(-1, *form.kernel), value.b_OR.reshape(*value.b_OR.shape, *ones)
    if form.turned:
        value = LowRank(value.a_RI.mT, value.b_OR.mT)
    if len(form.shape) == 3:
        return value.a_RI.flatten(0, 1), value.b_OR.permute(1, 2, 0).flatten(1)
    return value.a_RI, value.b_OR


def _norms(gram_TT: Tensor, truncated: Truncated) -> dict[str, Any]:
    """Norms of the inputs, of their sum and of the result, and the error of the truncation."""
    return {
        "norm": truncated.norm,
        "expert_norms": gram_TT.diagonal().clamp_min(0).sqrt().tolist(),
        "sum_norm": float(gram_TT.sum().clamp_min(0).sqrt()),
        "error_norm": truncated.error,
        "relative_error": truncated.error / truncated.norm if truncated.norm else 0.0,
        **retry_stats(truncated.retries),
    }


def _bias(item: Item, reader: ItemReader) -> Tensor:
    """Sum of the experts' additions to the layer's bias, or their mean over the experts that have one."""
    total, share = torch.zeros(item.shape[-2], dtype=torch.float64), 0.0
    additions, call = reader.biases(), item.write.bias
    assert call is not None, "planned for every module with a bias"
    weights = call.weights or (1.0,) * len(additions)
    for delta, weight in zip(additions, weights, strict=True):
        if delta is not None:
            total.add_(delta, alpha=weight)
            share += weight
    if call.method != "average":
        return total.mul_(call.scale * call.options.get("scaling", 1.0))
    return total / share if share else total


def check_range(item: Item, value: Tensor, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse entries that are not finite where the base's are; a mask of -inf in the base may stay one.

    Args:
        value: merged entries; `cast`: the same in the output dtype.

    Raises:
        NumericalError: there are such entries.
    """
    lost = torch.isfinite(base_raw) & ~torch.isfinite(cast)
    if not bool(lost.any()):
        return
    largest = f"{item.out_dtype}'s range ({torch.finfo(cast.dtype).max:g})"
    how = f"after merging with '{item.call.method}'" if item.call else "in the base"
    value_lost = float(value[lost][0])
    such = f", such as {value_lost:g}" if math.isfinite(value_lost) else ""
    wider = "bfloat16 or float32" if cast.dtype == torch.float16 else "float64"
    raise NumericalError(
        f"tensor '{item.name}' has values beyond {largest} {how}{such}; write with --dtype {wider}, or lower the scale"
    )


def check_sign(item: Item, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse variances that are negative where the base's are not.

    Raises:
        NumericalError: there are such entries.
    """
    lost = (cast < 0) & (base_raw >= 0)
    if bool(lost.any()):
        how = f"after merging with '{item.call.method}'" if item.call else "in the base"
        raise NumericalError(
            f"tensor '{item.name}' holds variances, expected to be 0 or more, and has {float(cast[lost][0]):g} {how}; "
            "merge it with 'average' and weights of 0 or more, or keep the base's (--keep '*running_var')"
        )
