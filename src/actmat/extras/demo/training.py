"""Training: schedules, seeds, and the loop that trains every base and expert."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

_WARM_UP = 0.1
_LONGEST_GRADIENT = 1.0

OnStep = Callable[[], object]
Item = TypeVar("Item")
Made = TypeVar("Made")


class Callback(Protocol):
    """Watches a training run, for analyses. Called from the training thread; gradients are those of the batch."""

    def before_step(self, step: int, loss: Tensor) -> None:
        """After `loss.backward()` and clipping, before the optimiser's step."""

    def after_step(self, step: int) -> None:
        """After the optimiser's step."""


class Resumed(Protocol):
    """The state of a training run that is kept from time to time."""

    def load(self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
        """Put the state back; the number of steps that it holds, 0 without one."""

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        """Write the state if it is time."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One training run: linear warm-up, then half a cosine down to zero, or the same rate throughout.

    Args:
        epochs: passes over the training examples.
        batch_size: examples per step; the last, smaller batch of an epoch is left out.
        learning_rate: its peak.
        weight_decay: decoupled, per unit of learning rate.
        warm_up_steps: length of the warm-up; a tenth of the steps unless given.
        micro_batches: pieces in which a batch goes through the model, if it does not fit as a whole.
        constant: no warm-up and no decay.
        optimiser: AdamW, or Adafactor, whose steps are relative to the size of each tensor.
        clip: longest gradient; None: as it is.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    warm_up_steps: int | None = None
    micro_batches: int = 1
    constant: bool = False
    optimiser: Literal["adamw", "adafactor"] = "adamw"
    clip: float | None = _LONGEST_GRADIENT

    def rate(self, step: int, n_steps: int) -> float:
        """Learning rate of a step."""
        share = 1.0 if self.constant else warm_cosine(step, n_steps, self.warm_up_steps)
        return self.learning_rate * share

    def optimiser_of(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser, without a state."""
        if self.optimiser == "adafactor":
            return torch.optim.Adafactor(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for every purpose, so that adding a draw in one place changes no other place."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{purpose}".encode()))


def steps_of(schedule: Schedule, n_examples: int) -> int:
    """Optimiser steps of a run."""
    return schedule.epochs * (n_examples // schedule.batch_size)


def warm_cosine(step: int, n_steps: int, warm_up_steps: int | None = None) -> float:
    """Share of the peak learning rate at `step` in `0..n_steps - 1`: a linear rise, then half a cosine to zero."""
    warm = max(1, round(_WARM_UP * n_steps)) if warm_up_steps is None else max(1, warm_up_steps)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, n_steps - warm)))


def descend(
    parameters: Sequence[nn.Parameter],
    losses: Callable[[int], Iterator[Tensor | Iterable[Tensor]]],
    n_steps: int,
    schedule: Schedule,
    on_step: OnStep = lambda: None,
    callbacks: Sequence[Callback] = (),
    resume: Resumed | None = None,
) -> None:
    """Minimise a stream of losses, each computed when it is asked for, at the weights of that moment.

    Args:
        losses: the stream from a given step on, one per step: a loss, or the terms that add up to it, for batches that
            do not fit the memory; each term is computed, and its gradient taken, before the next one. The run ends with
            the stream, if that ends first.
        on_step: called after every step, for progress.
    """
    optimiser = schedule.optimiser_of(parameters)
    first = resume.load(parameters, optimiser) if resume else 0
    for _ in range(first):
        on_step()
    stream = losses(first)
    for step in range(first, n_steps):
        optimiser.zero_grad()
        terms = next(stream, None)
        if terms is None:
            return
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step, n_steps)
        total = torch.zeros(())
        for term in (terms,) if isinstance(terms, Tensor) else terms:
            torch.autograd.backward(term)
            total = total + term.detach().cpu()
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(parameters, schedule.clip)
        for callback in callbacks:
            callback.before_step(step, total)
        optimiser.step()
        for callback in callbacks:
            callback.after_step(step)
        on_step()
        if resume:
            resume.keep(step + 1, n_steps, parameters, optimiser)


def side_by_side(work: Callable[[Item], Made], items: Iterable[Item], threads: int) -> list[Made]:
    """`work` on every item, each in a thread that computes with one thread; the first error is raised."""
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
