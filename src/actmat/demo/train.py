"""Training: the base on digits in all looks, an expert on one task behind a frozen head.

Shapes: `N` images, `H = W` pixels, `D` features.

Every run computes in one thread. On a model this small threads win little inside an operation, and the order of
additions, and so every bit of the result, would depend on their number; experts are trained side by side instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from actmat.demo.data import Photographs
from actmat.demo.heads import Head
from actmat.demo.model import Encoder, EncoderConfig, new_encoder
from actmat.demo.tasks import LOOKS, Examples, pose
from actmat.demo.training import Callback, OnStep, Schedule, descend, generator_for, steps_of

__all__ = ["finetune", "finetune_in_place", "pretrain"]


def pretrain(
    config: EncoderConfig, photographs: Photographs, schedule: Schedule, *, seed: int, on_step: OnStep = lambda: None
) -> Encoder:
    """The base: which digit is it, in every look. Its own heads, one per look, are thrown away.

    It knows all looks, as a large pretrained model does, but is asked only one of the questions of the tasks.
    """
    encoder = new_encoder(config, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = nn.ModuleList(nn.Linear(config.hidden_size, 10) for _ in LOOKS)
    shuffle = generator_for(seed, "pretraining order")
    posed = [pose(photographs, look, "digit", shuffle) for look in LOOKS]
    n_batches = len(photographs) // schedule.batch_size

    def losses(_: int) -> Iterator[Tensor]:
        for _ in range(schedule.epochs):
            orders = [torch.randperm(len(photographs), generator=shuffle) for _ in posed]
            for turn in torch.randperm(n_batches * len(posed), generator=shuffle).tolist():
                which, batch = divmod(turn, n_batches)
                index_N = orders[which][batch * schedule.batch_size : (batch + 1) * schedule.batch_size]
                examples = posed[which]
                logits_NC = heads[which](encoder(examples.images_NHW[index_N]))
                yield nn.functional.cross_entropy(logits_NC, examples.labels_N[index_N])

    parameters = [*encoder.parameters(), *heads.parameters()]
    descend(parameters, losses, len(LOOKS) * steps_of(schedule, len(photographs)), schedule, on_step)
    return encoder


def finetune(
    base: Encoder,
    head: Head,
    examples: Examples,
    schedule: Schedule,
    *,
    generator: torch.Generator,
    on_step: OnStep = lambda: None,
) -> Encoder:
    """An expert: all weights of a copy of the base, trained on one task. The head takes no part in it.

    Args:
        base: left as it is.
        head: the frozen head of the task.
        examples: training examples of the task.
        schedule: length and step size.
        generator: order of the examples.
        on_step: called after every step, from the calling thread.
    """
    expert = copy.deepcopy(base)
    finetune_in_place(expert, head, examples, schedule, generator=generator, on_step=on_step)
    return expert


def finetune_in_place(
    expert: Encoder,
    head: Head,
    examples: Examples,
    schedule: Schedule,
    *,
    generator: torch.Generator,
    on_step: OnStep = lambda: None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """`finetune` of a model that is there already, for those who watch it meanwhile.

    Args:
        expert: a copy of the base, changed in place.
        head: as in `finetune`.
        examples: as in `finetune`.
        schedule: as in `finetune`.
        generator: as in `finetune`.
        on_step: as in `finetune`.
        callbacks: analyses of the run.
    """

    def losses(_: int) -> Iterator[Tensor]:
        for _ in range(schedule.epochs):
            order_N = torch.randperm(len(examples), generator=generator)
            for index_N in torch.split(order_N, schedule.batch_size):
                if len(index_N) == schedule.batch_size:
                    logits_NC = head(expert(examples.images_NHW[index_N]))
                    yield nn.functional.cross_entropy(logits_NC, examples.labels_N[index_N])

    n_steps = steps_of(schedule, len(examples))
    descend(list(expert.parameters()), losses, n_steps, schedule, on_step, callbacks)
