"""Write merged deltas: add to the base, cast, hash, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.task import Task
from actmat.errors import NumericalError
from actmat.plan.model import Item
from actmat.plan.parts import CHUNK, Part

__all__ = ["check_range", "write_chunk", "write_part"]


def write_part(
    task: Task, part: Part, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader
) -> None:
    """`W_0 + scale * D*` in the output dtype, chunk by chunk; no delta at all keeps the base's bits.

    Sums and casts land in warm buffers: allocating for every chunk would cost as much as the arithmetic.
    """
    for low in range(0, base_raw.numel(), CHUNK):
        chunk = base_raw[low : low + CHUNK]
        if delta is not None:
            merged = reader.scratch.merged.take(chunk.numel(), reader.compute_dtype)
            wide, change = reader.wide_base(part.start + low, chunk), delta[low : low + CHUNK].to("cpu")
            chunk = torch.add(wide, change, alpha=task.call.scale, out=merged)
        write_chunk(task, chunk, reader)


def write_chunk(task: Task, chunk: Tensor, reader: TensorReader) -> None:
    """Cast and write one chunk.

    Raises:
        NumericalError: from `check_range`.
    """
    out_dtype = torch_dtype(task.item.out_dtype)
    if chunk.dtype != out_dtype:
        cast = reader.scratch.cast.take(chunk.numel(), out_dtype).copy_(chunk)
        check_range(task.item, chunk, cast)
        chunk = cast
    task.sink.write(raw_bytes(chunk))


def check_range(item: Item, value: Tensor, cast: Tensor) -> None:
    """Refuse finite entries that became infinite; entries that were not finite (a mask of -inf) may stay so.

    Raises:
        NumericalError: they did.
    """
    narrower = cast.dtype == torch.float16 or value.dtype == torch.float64
    if not narrower or bool(torch.isfinite(cast).all()):
        return
    lost = torch.isfinite(value) & ~torch.isfinite(cast)
    if bool(lost.any()):
        how = f"after merging with '{item.call.method}'" if item.call else "in the base"
        raise NumericalError(
            f"tensor '{item.name}' has values beyond {item.out_dtype}'s range ({torch.finfo(cast.dtype).max:g}) {how}, "
            f"such as {float(value[lost][0]):g}; write with --dtype bfloat16 or float32, or lower the scale"
        )
