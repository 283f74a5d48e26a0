"""Write merged deltas: add to the base, cast, hash, chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.task import Task
from actmat.errors import NumericalError
from actmat.layout.classify import is_variance
from actmat.planning.model import Item
from actmat.planning.regions import CHUNK, Region

__all__ = ["check_range", "check_sign", "write_chunk", "write_region"]


def write_region(
    task: Task, region: Region, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader
) -> None:
    """`W_0 + scale * D*` in the output dtype, chunk by chunk; no delta at all keeps the base's bits.

    Of a tensor that is written as factors, the merged delta is kept until all of it is there.
    """
    if task.factors is not None:
        if delta is not None:
            task.merged_sample.add(region.start, delta, task.call.scale)
            task.factors.add(region.start, delta, task.call.scale)
        return
    if delta is None:
        for low in range(0, base_raw.numel(), CHUNK):
            chunk = base_raw[low : low + CHUNK]
            write_chunk(task, chunk, chunk, reader)
        return
    task.merged_sample.add(region.start, delta, task.call.scale)
    low, out_dtype = 0, torch_dtype(task.item.write_dtype)
    for chunk in reader.merged_chunks(region, base_raw, delta, task.call.scale, out_dtype):
        write_chunk(task, chunk, base_raw[low : low + chunk.numel()], reader)
        low += chunk.numel()


def write_chunk(task: Task, chunk: Tensor, base_raw: Tensor, reader: TensorReader) -> None:
    """Cast, check and write one chunk.

    Args:
        chunk: merged entries.
        base_raw: the same entries of the base, as stored.

    Raises:
        NumericalError: from `check_range` and `check_sign`.
    """
    out_dtype = torch_dtype(task.item.write_dtype)
    cast = chunk
    if chunk.dtype != out_dtype:
        cast = reader.scratch.cast.take(chunk.numel(), out_dtype).copy_(chunk)
    # a sum is finite only if every entry is (or it overflows): one pass in the cache, an exact one only then
    if out_dtype.is_floating_point and not math.isfinite(float(cast.sum())):
        check_range(task.item, chunk, cast, base_raw)
    if is_variance(task.item.name):
        check_sign(task.item, cast, base_raw)
    task.sink.write(raw_bytes(cast))


def check_range(item: Item, value: Tensor, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse entries that are not finite where the base's are; a mask of -inf in the base may stay one.

    Args:
        value: merged entries; `cast`: the same in the output dtype.

    Raises:
        NumericalError: there are some.
    """
    lost = torch.isfinite(base_raw) & ~torch.isfinite(cast)
    if not bool(lost.any()):
        return
    largest = f"{item.write_dtype}'s range ({torch.finfo(cast.dtype).max:g})"
    how = f"after merging with '{item.call.method}'" if item.call else "in the base"
    found = float(value[lost][0])
    such = f", such as {found:g}" if math.isfinite(found) else ""
    wider = "bfloat16 or float32" if cast.dtype == torch.float16 else "float64"
    raise NumericalError(
        f"tensor '{item.name}' has values beyond {largest} {how}{such}; write with --dtype {wider}, or lower the scale"
    )


def check_sign(item: Item, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse variances that are negative where the base's are not.

    Raises:
        NumericalError: there are some.
    """
    lost = (cast < 0) & (base_raw >= 0)
    if bool(lost.any()):
        how = f"after merging with '{item.call.method}'" if item.call else "in the base"
        raise NumericalError(
            f"tensor '{item.name}' holds variances, expected to be 0 or more, and has {float(cast[lost][0]):g} {how}; "
            "merge it with 'average' and weights of 0 or more, or keep the base's (--keep '*running_var')"
        )
