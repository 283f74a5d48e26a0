"""A finished demo of a second, and an analysis without a model."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from actmat.extras.demo.model import EncoderConfig
from actmat.extras.demo.training import DemoSchedule, DemoSettings
from actmat_experiments.analyses.result import Analysis
from actmat_experiments.harness.table import new_table

METHODS = ["average", "actmat"]
TINY = DemoSettings(
    encoder=EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
    n_validation=1400,
    n_test=200,
    n_views=1,
    pretraining=DemoSchedule(1, 64, 3e-3),
    finetuning=DemoSchedule(1, 64, 1e-3),
)
"""A demo of a second: too few steps to learn much."""


def tiny_demo(out: Path) -> Path:
    """Checkpoints, heads and results of a demo with a tiny model."""
    from actmat.extras.demo.run import run_demo

    run_demo(out, seed=1, methods=METHODS, settings=TINY)
    return out


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram(n: int, width: int, seed: int) -> Tensor:
    """`E[z z^T]` of `n` random inputs."""
    z = gaussian(n, width, seed=seed)
    return z.mT @ z / n


class Plain(Analysis):
    """One number."""

    name = "plain"

    def __init__(self, value: float) -> None:
        self.value = value

    def data(self):
        return {"value": self.value, "nested": {"list": [1.0, float("nan")], 3: float("inf")}}

    def tables(self) -> list[Table]:
        return [new_table("t", "c", "n", ("a",))]

    def figure(self):
        from actmat_experiments.harness.figures import new_axes

        figure, axes = new_axes("plain")
        axes.plot([1, 2], [1, self.value])
        return figure
