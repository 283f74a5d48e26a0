"""Write what was merged: add to the base, cast, hash, piece by piece."""

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

__all__ = ["check_range", "write_piece", "write_value"]


def write_piece(
    task: Task, part: Part, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader
) -> None:
    """`W_0 + scale * D*` in the output dtype, piece by piece; no delta at all keeps the base's bits.

    Sums and casts land in warm buffers: allocating for every piece would cost as much as the arithmetic.
    """
    for low in range(0, base_raw.numel(), CHUNK):
        piece = base_raw[low : low + CHUNK]
        if delta is not None:
            merged = reader.scratch.merged.take(piece.numel(), reader.compute_dtype)
            wide, change = reader.wide_base(part.start + low, piece), delta[low : low + CHUNK].to("cpu")
            piece = torch.add(wide, change, alpha=task.call.scale, out=merged)
        write_value(task, piece, reader)


def write_value(task: Task, piece: Tensor, reader: TensorReader) -> None:
    """Cast and write one piece.

    Raises:
        NumericalError: from `check_range`.
    """
    out_dtype = torch_dtype(task.item.out_dtype)
    if piece.dtype != out_dtype:
        cast = reader.scratch.cast.take(piece.numel(), out_dtype).copy_(piece)
        check_range(task.item, piece, cast)
        piece = cast
    task.sink.write(raw_bytes(piece))


def check_range(item: Item, value: Tensor, cast: Tensor) -> None:
    """Whether finite entries became infinite; what was not finite before (a mask of -inf in the base) may stay so.

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
