"""Experts that are adapters: `W_t = W_0 + 2 B A` on every matrix of the encoder, all else frozen.

Shapes: `O` out_features, `I` in_features, `R` rank. Start as usual: `A` uniform in `+-1/sqrt(I)`, `B` zero.
E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from actmat.demo.heads import Head
from actmat.demo.model import Encoder
from actmat.demo.tasks import Examples
from actmat.demo.training import Schedule, descend, steps_of
from actmat_experiments.forecast.parts import matrices

__all__ = ["finetune_lowrank"]

_ALPHA = 2.0
"""Factor of the product, `alpha / rank` as it is commonly set."""


def finetune_lowrank(
    base: Encoder, head: Head, examples: Examples, schedule: Schedule, *, rank: int, generator: torch.Generator
) -> Encoder:
    """An expert whose matrices differ from the base's by a product of rank `rank`; packed q, k and v have one each.

    Args:
        base: left as it is.
        rank: at least 1.
        generator: starts of the factors, order of the examples.
    """
    frozen = copy.deepcopy(base).requires_grad_(False)
    weights = dict(frozen.named_parameters())
    factors: dict[str, list[tuple[nn.Parameter, nn.Parameter]]] = {}
    for (name, _), block in matrices(weights).items():
        height, width = block.shape
        start = (2 * torch.rand(rank, width, generator=generator) - 1) / math.sqrt(width)
        pair = nn.Parameter(torch.zeros(height, rank)), nn.Parameter(start)
        factors.setdefault(name, []).append(pair)

    def adapted() -> dict[str, Tensor]:
        deltas = {name: torch.cat([_ALPHA * (b_OR @ a_RI) for b_OR, a_RI in f]) for name, f in factors.items()}
        return {name: weights[name] + delta for name, delta in deltas.items()}

    def losses(_first: int) -> Iterator[Tensor]:
        for _ in range(schedule.epochs):
            order_N = torch.randperm(len(examples), generator=generator)
            for index_N in torch.split(order_N, schedule.batch_size):
                if len(index_N) == schedule.batch_size:
                    found = torch.func.functional_call(frozen, adapted(), (examples.images_NHW[index_N],))
                    yield nn.functional.cross_entropy(head(found), examples.labels_N[index_N])

    parameters = [p for pairs in factors.values() for pair in pairs for p in pair]
    descend(parameters, losses, steps_of(schedule, len(examples)), schedule)
    with torch.no_grad():
        for name, weight in adapted().items():
            weights[name].copy_(weight)
    return frozen
