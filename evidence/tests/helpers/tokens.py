"""A slow and plain account of Theorem 3.1's sums: one token at a time, in float64, gradients by autograd alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def naive_sums(steps: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """`G`, `S`, `S~` from the inputs `N I` and output gradients `N O` of every step, token by token."""
    gradient = second = decoupled = None
    for z, g in steps:
        z, g = z.double(), g.double()
        inputs, weighted, size = torch.zeros(2, z.shape[1], z.shape[1]).double(), 0, 0.0
        for z_I, g_O in zip(z, g, strict=True):
            outer = torch.outer(z_I, z_I)
            inputs[0] += outer
            inputs[1] += outer * float(g_O @ g_O)
            size += float(g_O @ g_O)
            weighted = weighted + torch.outer(g_O, z_I)
        n = len(z)
        # N times as large as the expectations' product, like the sums
        step = (weighted, n * inputs[1], inputs[0] * size)
        total = (gradient, second, decoupled)
        gradient, second, decoupled = (x if t is None else t + x for t, x in zip(total, step, strict=True))
    return {"gradient": gradient, "second": second, "decoupled": decoupled}


class NaiveAttention(nn.Module):
    """`nn.MultiheadAttention` (self-attention, batch first) in single steps; keeps what goes in and out of its maps."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.module, self.kept = module, {}

    def forward(self, x: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, None]:
        m = self.module
        heads, width = m.num_heads, m.embed_dim // m.num_heads
        packed = zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), "qkv", strict=True)
        q, k, v = (self._keep(f"in_proj_weight[{n}]", x, x @ w.mT + b) for w, b, n in packed)
        q, k, v = (y.unflatten(-1, (heads, width)).transpose(1, 2) for y in (q, k, v))
        mixed = (torch.softmax(q @ k.mT / width**0.5, -1) @ v).transpose(1, 2).flatten(-2)
        return self._keep("out_proj.weight", mixed, mixed @ m.out_proj.weight.mT + m.out_proj.bias), None

    def _keep(self, name: str, z: Tensor, y: Tensor) -> Tensor:
        y.retain_grad()
        self.kept[name] = (z.detach(), y)
        return y
