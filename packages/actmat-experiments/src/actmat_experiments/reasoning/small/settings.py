"""What the small suite can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actmat.demo.training import Schedule
from actmat_experiments.reasoning.small.model import Size

__all__ = ["SmallSettings"]


@dataclass(frozen=True, slots=True)
class SmallSettings:
    """Settings of the suite, for `--set name=value`.

    The learning rate was chosen by the training reward of the expert `add` of seed 0, before anything was merged: at
    four times the rate its reward fell after fifty steps.

    Args:
        hidden, intermediate, layers, heads: of the decoder; about 0.8 million parameters by default.
        reliability: share of right answers in the text that the base reads.
        base_steps, base_batch, base_rate: pretraining; lines per step are of all tasks in equal parts.
        steps: optimiser steps of reinforcement learning.
        prompts: prompts per step.
        group: answers per prompt, which are compared with one another.
        rate: learning rate of reinforcement learning, constant but for a short warm-up.
        validation: prompts per task kept for choosing scales.
        test: prompts per task that are reported.
        samples: answers per test prompt.
        k: of `@k`, beside `@1`.
        temperature: of all answers, in training and evaluation.
        validation_samples: answers per validation prompt, when scales are chosen.
        measured: training prompts per task that statistics are measured on.
        storages: dtypes that base and experts are stored in before they are merged.
        scales: of the merged delta, tried on validation prompts; empty: nothing is tuned.
    """

    hidden: int = 128
    intermediate: int = 352
    layers: int = 4
    heads: int = 4
    reliability: float = 0.5
    base_steps: int = 800
    base_batch: int = 256
    base_rate: float = 2e-3
    steps: int = 100
    prompts: int = 32
    group: int = 8
    rate: float = 5e-5
    validation: int = 64
    test: int = 200
    samples: int = 16
    k: int = 8
    temperature: float = 1.0
    validation_samples: int = 4
    measured: int = 320
    storages: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    scales: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)

    @property
    def size(self) -> Size:
        """Of the decoder."""
        return Size(self.hidden, self.intermediate, self.layers, self.heads)

    @property
    def pretraining(self) -> Schedule:
        """Of the base; its epochs are single steps, because every line is drawn anew."""
        return Schedule(self.base_steps, self.base_batch, self.base_rate, weight_decay=0.05)
