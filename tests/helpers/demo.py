"""Small inputs for the tests of the demo."""

from __future__ import annotations

import torch

from actmat.extras.demo.model import EncoderConfig
from actmat.extras.demo.results import DemoResult, Interval, Row
from actmat.extras.demo.run import DemoSettings
from actmat.extras.demo.tasks import TASKS, Photographs
from actmat.extras.demo.training import Schedule

TINY_ENCODER = EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)

TINY = DemoSettings(
    encoder=TINY_ENCODER,
    n_validation=1400,
    n_test=200,
    n_views=1,
    pretraining=Schedule(1, 64, 3e-3),
    finetuning=Schedule(1, 64, 1e-3),
)
"""A demo of a second: 197 photographs to train on, too few steps to learn much."""


def some_photographs(n: int = 40, seed: int = 0) -> Photographs:
    """Random pixels, every digit in turn."""
    generator = torch.Generator().manual_seed(seed)
    return Photographs(torch.rand(n, 8, 8, generator=generator), torch.arange(n) % 10)


def made_up_result(averages: dict[str, float]) -> DemoResult:
    """A result with rows of these averages: "majority", "base" and "experts" are what they say, others merged."""
    kinds = {"majority": "majority", "base": "base", "experts": "expert"}
    rows = [
        Row(
            name=name,
            kind=kinds.get(name, "merged"),
            tasks={t.name: Interval(value, value - 0.02, value + 0.02) for t in TASKS},
            average=Interval(value, value - 0.01, value + 0.01),
            normalised=value / averages["experts"],
            drops={t.name: averages["experts"] - value for t in TASKS},
        )
        for name, value in averages.items()
    ]
    return DemoResult(
        out=None,
        seed=3,
        settings={},
        tasks=[{"name": t.name} for t in TASKS],
        n_photographs={"train": 10, "validation": 5, "test": 7},
        rows=rows,
        left_out={},
        versions={},
        seconds={},
    )
