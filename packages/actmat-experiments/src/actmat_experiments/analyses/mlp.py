"""A multilayer perceptron whose Lipschitz constants are known: the small network of the two theorems.

    z_1 = x,   z_{l+1} = phi(W_l z_l + b_l),   f(x) = W_L z_L + b_L

Shapes: `N` samples, `I` in_features, `O` out_features of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "MLP", "ActivationName", "new_mlp"]

ActivationName = Literal["relu", "tanh"]

ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}
"""Lipschitz constant 1, both (GELU has 1.13 and is left out)."""


class MLP(nn.Module):
    """`layers[l]`, stored as `linear.l`, is `W_l, b_l`; no activation after the last."""

    def __init__(self, widths: Sequence[int], activation: ActivationName) -> None:
        super().__init__()
        self.activation: ActivationName = activation
        self.linear = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))

    @property
    def layers(self) -> list[nn.Linear]:
        """In their order."""
        return [layer for layer in self.linear if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        """`N I -> N O`; what has more axes is flattened first."""
        z_NI = x.flatten(1)
        for index, layer in enumerate(self.layers):
            z_NI = layer(z_NI)
            if index + 1 < len(self.layers):
                z_NI = ACTIVATIONS[self.activation](z_NI)
        return z_NI

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """The input `z_l` of every layer, `N I`, in their order."""
        z_NI = x.flatten(1)
        for layer in self.layers:
            yield z_NI
            z_NI = ACTIVATIONS[self.activation](layer(z_NI))


def new_mlp(widths: Sequence[int], *, activation: ActivationName = "relu", seed: int = 0) -> MLP:
    """A freshly initialised one in float64 that depends on the seed alone; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP(widths, activation).double()
