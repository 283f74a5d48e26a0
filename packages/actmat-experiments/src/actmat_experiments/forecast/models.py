"""Bases and experts on which forecasts are tried: the demo's digits, at several sizes, rates and ways of training.

A *family* is an architecture and a way of training; its seeds share neither data split nor weights. Experts of a LoRA
family are `W_t = W_0 + 2 B A` on every matrix of the encoder, all else frozen, started as usual: `A` uniform in
`+-1/sqrt(I)`, `B` zero. E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

Shapes: `N` images, `H = W` pixels, `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from actmat.extras.demo.heads import Head, features, fit_head
from actmat.extras.demo.model import Encoder, EncoderConfig
from actmat.extras.demo.run import DemoSettings, load_data
from actmat.extras.demo.tasks import TASKS, Examples, TaskData
from actmat.extras.demo.train import finetune, pretrain
from actmat.extras.demo.training import Schedule, descend, generator_for, steps_of
from actmat_experiments.core import collect, unpack

Key = tuple[str, int]
"""Name of a tensor and number of the block in it."""
Factors = Mapping[Key, tuple[Tensor, Tensor, Tensor]]
"""Matrix -> `B` (`O R`), `A` and its start (`R I`)."""


def matrices(state: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """The matrices of linear layers: `O I`, views; q, k and v of a packed projection apart."""
    found: dict[Key, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim == 2 and not name.startswith("position_embeddings"):
            blocks = tensor.chunk(3) if name.endswith("in_proj_weight") else (tensor,)
            found |= {(name, k): block for k, block in enumerate(blocks)}
    return found


def input_grams(model: Encoder, images_NHW: Tensor) -> dict[Key, Tensor]:
    """`sum z z^T` over all tokens of the images, `I I`, for the input of every matrix of the model."""
    measured = collect(model, [images_NHW])
    found: dict[Key, Tensor] = {}
    for name, block in matrices(model.state_dict()):
        key = measured.header.places[name][0].gram
        found[name, block] = unpack(measured.tensors[f"gram.{key}"](), measured.header.grams[key].width)
    return found


_ALPHA = 2.0
"""Factor of the product, `alpha / rank` as it is commonly set."""


def finetune_lowrank(
    base: Encoder, head: Head, examples: Examples, schedule: Schedule, *, rank: int, generator: torch.Generator
) -> tuple[Encoder, Factors]:
    """An expert and its factors: matrices differ from the base's by a product of rank `rank`.

    Packed q, k and v have one each.

    Args:
        base: left as it is.
        rank: at least 1.
        generator: starts of the factors, order of the examples.
    """
    frozen = copy.deepcopy(base).requires_grad_(False)
    weights = dict(frozen.named_parameters())
    factors: dict[str, list[tuple[nn.Parameter, nn.Parameter]]] = {}
    starts: dict[Key, Tensor] = {}
    for (name, number), block in matrices(weights).items():
        height, width = block.shape
        start = (2 * torch.rand(rank, width, generator=generator) - 1) / math.sqrt(width)
        starts[name, number] = start
        pair = nn.Parameter(torch.zeros(height, rank)), nn.Parameter(start.clone())
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
    pairs = {(name, k): pair for name, some in factors.items() for k, pair in enumerate(some)}
    return frozen, {key: (b.detach(), a.detach(), starts[key]) for key, (b, a) in pairs.items()}


@dataclass(frozen=True, slots=True)
class Family:
    """Sizes and training of the models of one family.

    Args:
        regime: all weights, or low-rank factors on every matrix.
        learning_rate: of the experts, its peak.
        rank: of the factors; 0: full fine-tuning.
        base_epochs: of the base; after few, experts have much to gain, and to lose.
    """

    name: str
    regime: Literal["full", "lora"]
    encoder: EncoderConfig
    learning_rate: float
    rank: int = 0
    epochs: int = 6
    base_epochs: int = 4

    @property
    def settings(self) -> DemoSettings:
        """The demo's, with fewer photographs to test on and one view of each to train an expert on."""
        return DemoSettings(
            encoder=self.encoder,
            n_test=300,
            n_views=1,
            pretraining=Schedule(self.base_epochs, 64, 2e-3, weight_decay=0.05),
            finetuning=Schedule(self.epochs, 64, self.learning_rate),
        )


_SMALL = EncoderConfig(patch_size=4)
_DEEP = EncoderConfig(patch_size=4, hidden_size=32, intermediate_size=96, num_hidden_layers=4)
_WIDE = EncoderConfig(patch_size=4, hidden_size=96, intermediate_size=192)

FAMILIES: tuple[Family, ...] = (
    Family("full", "full", _SMALL, 3e-4),
    Family("full-fast", "full", _SMALL, 2e-3),
    Family("full-deep", "full", _DEEP, 8e-4),
    Family("full-wide", "full", _WIDE, 1e-3, base_epochs=1),
    Family("lora", "lora", _SMALL, 4e-3, rank=4),
    Family("lora-deep", "lora", _DEEP, 6e-3, rank=2, base_epochs=1),
)


@dataclass(frozen=True, slots=True)
class Trained:
    """A base, its experts, their frozen heads and their data, by task; of LoRA experts also the factors."""

    base: Encoder
    experts: Mapping[str, Encoder]
    heads: Mapping[str, Head]
    data: Mapping[str, TaskData]
    factors: Mapping[str, Factors] = field(default_factory=dict)


def train(family: Family, seed: int) -> Trained:
    """Everything from the seed alone."""
    settings = family.settings
    split, data = load_data(settings, seed)
    base = pretrain(settings.encoder, split.train, settings.pretraining, seed=seed)
    experts, heads, factors = {}, {}, {}
    for task in TASKS:
        posed = data[task.name]
        found = features(base, posed.train.images_NHW)
        head = heads[task.name] = fit_head(
            found, posed.train.labels_N, task.n_classes, ridge=settings.ridge, scale=settings.logit_scale
        )
        order = generator_for(seed, f"finetuning {task.name}")
        if family.regime == "full":
            expert = finetune(copy.deepcopy(base), head, posed.train, settings.finetuning, generator=order)
        else:
            expert, factors[task.name] = finetune_lowrank(
                base, head, posed.train, settings.finetuning, rank=family.rank, generator=order
            )
        experts[task.name] = expert
    return Trained(base, experts, heads, data, factors)
