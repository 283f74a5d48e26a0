"""Training: the base on digits in all looks, an expert on one task behind a frozen head.

Shapes: `N` images, `H = W` pixels, `D` features.

Every run computes in one thread: the order of additions, and so every bit of the result, would depend on the number of
threads, which win little on a model this small. Experts are trained side by side instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from actmat.extras.demo.heads import Head
from actmat.extras.demo.model import Encoder, EncoderConfig, new_encoder
from actmat.extras.demo.tasks import LOOKS, Examples, Photographs, pose
from actmat.extras.demo.training import Callback, OnStep, Schedule, descend, generator_for, steps_of


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
    expert: Encoder,
    head: Head,
    examples: Examples,
    schedule: Schedule,
    *,
    generator: torch.Generator,
    on_step: OnStep = lambda: None,
    callbacks: Sequence[Callback] = (),
) -> Encoder:
    """Train all weights of a copy of the base, in place, on one task behind its frozen head; returns it.

    Args:
        generator: of the order of the examples.
        on_step: called after every step, from the calling thread.
        callbacks: analyses of the run.
    """

    def losses(_: int) -> Iterator[Tensor]:
        for _ in range(schedule.epochs):
            order_N = torch.randperm(len(examples), generator=generator)
            for index_N in torch.split(order_N, schedule.batch_size):
                if len(index_N) == schedule.batch_size:
                    logits_NC = head(expert(examples.images_NHW[index_N]))
                    yield nn.functional.cross_entropy(logits_NC, examples.labels_N[index_N])

    descend(list(expert.parameters()), losses, steps_of(schedule, len(examples)), schedule, on_step, callbacks)
    return expert
