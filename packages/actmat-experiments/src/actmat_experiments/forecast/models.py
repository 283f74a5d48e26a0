"""Bases and experts on which forecasts are tried: the demo's digits, at several sizes, rates and ways of training.

A *family* is an architecture and a way of training; its seeds share neither data split nor weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from actmat.demo.heads import Head, features, fit_head
from actmat.demo.model import Encoder, EncoderConfig
from actmat.demo.run import DemoSettings, load_data
from actmat.demo.tasks import TASKS, TaskData
from actmat.demo.train import finetune, pretrain
from actmat.demo.training import Schedule, generator_for
from actmat_experiments.forecast.lowrank import finetune_lowrank

__all__ = ["FAMILIES", "Family", "Trained", "train"]


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one family are made.

    Args:
        name: as in the tables.
        regime: all weights, or low-rank factors on every matrix.
        encoder: sizes.
        learning_rate: of the experts, its peak.
        rank: of the factors; 0: full fine-tuning.
        epochs: of the experts.
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
    """A base, its experts, their frozen heads and their data, by task."""

    base: Encoder
    experts: Mapping[str, Encoder]
    heads: Mapping[str, Head]
    data: Mapping[str, TaskData]


def train(family: Family, seed: int) -> Trained:
    """Everything from the seed alone."""
    settings = family.settings
    split, data = load_data(settings, seed)
    base = pretrain(settings.encoder, split.train, settings.pretraining, seed=seed)
    experts, heads = {}, {}
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
            expert = finetune_lowrank(base, head, posed.train, settings.finetuning, rank=family.rank, generator=order)
        experts[task.name] = expert
    return Trained(base, experts, heads, data)
