"""The input of a convolution as rows of a linear layer.

Shapes: `B` samples, `C` channels, `G` groups, `k` kernel, `I = (C / G) prod(k)` in_features, `N` rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["unfold"]


def unfold(
    input: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Callable[[], Tensor], torch.Size]:
    """Patches under the kernel as rows `N I`, or `N G I`, in the order of `weight.flatten(1)`.

    Args:
        input: `B C *spatial`.
        kernel: one size per spatial axis.
        stride, padding, dilation: as for `torch.nn.functional.conv2d`; `padding` may be "same" or "valid".
        groups: `G`.

    Returns:
        A function that computes the rows, and their leading shape `B *positions`.
    """
    n_axes = len(kernel)
    strides, dilations = _each(stride, n_axes), _each(dilation, n_axes)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if padding == "same":
        before = [(s - 1) // 2 for s in spans]
        pads = list(zip(before, [s - 1 - b for s, b in zip(spans, before, strict=True)], strict=True))
    else:
        pads = [(p, p) for p in _each(0 if padding == "valid" else padding, n_axes)]
    sizes = [n + a + b for n, (a, b) in zip(input.shape[2:], pads, strict=True)]
    positions = [(n - s) // t + 1 for n, s, t in zip(sizes, spans, strides, strict=True)]

    def patches() -> Tensor:
        value = functional.pad(input, [n for pair in reversed(pads) for n in pair])
        for axis, (span, step, gap) in enumerate(zip(spans, strides, dilations, strict=True)):
            value = value.unfold(2 + axis, span, step)[..., ::gap]
        width = input.shape[1] // groups
        value = value.reshape(input.shape[0], groups, width, *positions, *kernel)
        order = [0, *range(3, 3 + n_axes), 1, 2, *range(3 + n_axes, 3 + 2 * n_axes)]
        rows = value.permute(order).reshape(-1, groups, width * math.prod(kernel))
        return rows.squeeze(1) if groups == 1 else rows

    return patches, torch.Size([input.shape[0], *positions])


def _each(value: Any, n: int) -> list[int]:
    return [int(v) for v in value] * (n if len(value) == 1 else 1) if isinstance(value, Sequence) else [int(value)] * n
