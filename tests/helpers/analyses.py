"""A finished demo of a second, and an analysis without a model."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.table import Table
from tests.helpers.demo import TINY
from torch import Tensor

from actmat_experiments.analyses.result import Analysis
from actmat_experiments.harness.table import new_table

METHODS = ["average", "actmat"]


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
