"""Small inputs for the tests of the demo."""

import torch

from actmat.extras.demo.model import EncoderConfig
from actmat.extras.demo.tasks import Examples
from actmat.extras.demo.training import DemoSchedule, DemoSettings

TINY_ENCODER = EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)

TINY = DemoSettings(
    encoder=TINY_ENCODER,
    n_validation=1400,
    n_test=200,
    n_views=1,
    pretraining=DemoSchedule(1, 64, 3e-3),
    finetuning=DemoSchedule(1, 64, 1e-3),
)
"""A demo of a second: 197 photographs to train on, too few steps to learn much."""


def some_photographs(n: int = 40, seed: int = 0) -> Examples:
    """Random pixels, every digit in turn."""
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.rand(n, 8, 8, generator=generator), torch.arange(n) % 10)
