"""The order in which training examples are seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.training import Schedule


def order_of(n: int, schedule: Schedule, seed: int, name: str, first: int = 0) -> Iterator[list[int]]:
    """Positions of each step's examples among `n`, from step `first` on; every epoch has an order of its own.

    >>> list(order_of(4, Schedule(1, 2, 1e-3), seed=0, name="task"))
    [[3, 1], [0, 2]]
    """
    per_epoch = n // schedule.batch_size
    for step in range(first, schedule.epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(n, generator=generator_for(seed, f"order {name} {epoch}"))
        yield order[place * schedule.batch_size : (place + 1) * schedule.batch_size].tolist()
