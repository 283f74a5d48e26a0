"""Settings and training: the base on digits in all looks, experts on one task with a frozen head.

Shapes: `N` images, `H = W` pixels.

Every run uses one thread, because the order of additions, and so the bits of the result, depends on the number of
threads. Experts are trained in parallel instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from actmat.extras.demo import tasks
from actmat.extras.demo.model import Encoder, EncoderConfig, Head, features, fit_head, new_encoder
from actmat.extras.demo.tasks import TASKS, Examples, Split, generator_for


@dataclass(frozen=True, slots=True)
class DemoSchedule:
    """Schedule of an AdamW run: linear warm-up, then half a cosine to zero.

    Args:
        epochs: passes over the training examples.
        batch_size: examples per step; the last, smaller batch of an epoch is skipped.
        learning_rate: peak learning rate.
        weight_decay: decoupled, per unit of learning rate.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0

    def steps(self, n_examples: int) -> int:
        """Number of optimizer steps of a run."""
        return self.epochs * (n_examples // self.batch_size)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """All settings except the seed. The defaults were chosen on the validation photographs of seeds 0, 1 and 2.

    The base is trained only briefly, so that the experts can improve on it. The experts use a low learning rate,
    because several times this rate gives better experts, but merges that are not better than the base with any
    method.

    Args:
        encoder: sizes of the model.
        n_validation: photographs for choosing settings.
        n_test: photographs for the reported numbers.
        n_views: copies of every training photograph: the original, and others shifted by up to a pixel.
        pretraining: schedule of the base.
        finetuning: schedule of every expert.
        ridge: regularization of the heads, relative to the mean variance of a feature.
        logit_scale: factor of the heads' regression outputs (about 0 to 1) before the softmax.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    n_validation: int = 297
    n_test: int = 600
    n_views: int = 3
    pretraining: DemoSchedule = field(default_factory=lambda: DemoSchedule(3, 64, 2e-3, weight_decay=0.05))
    finetuning: DemoSchedule = field(default_factory=lambda: DemoSchedule(8, 128, 1.5e-4))
    ridge: float = 0.1
    logit_scale: float = 10.0


def load_split(settings: DemoSettings, seed: int) -> Split:
    """Split the photographs into three parts, by the seed.

    Raises:
        MergeError: scikit-learn is missing.
    """
    return tasks.split_photographs(settings.n_validation, settings.n_test, generator_for(seed, "split"))


def load_data(settings: DemoSettings, seed: int) -> dict[str, Split]:
    """Task -> data, all from the same photographs."""
    split = load_split(settings, seed)
    return {task.name: tasks.pose_split(task, split, n_views=settings.n_views, seed=seed) for task in TASKS}


def warm_cosine(step: int, n_steps: int, warm_up_steps: int | None = None) -> float:
    """Share of the peak learning rate at `step` in `0..n_steps - 1`: a linear rise, then half a cosine to zero.

    Args:
        warm_up_steps: length of the rise; a tenth of the steps unless given.
    """
    warm = max(1, round(0.1 * n_steps) if warm_up_steps is None else warm_up_steps)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, n_steps - warm)))


def train_base(settings: DemoSettings, seed: int) -> Encoder:
    """Train an encoder that classifies digits in every look; its linear heads, one per look, are discarded.

    Like a large pretrained model, it has seen all looks, but only one of the tasks' questions.
    """
    moves = generator_for(seed, "views of the base")
    photographs = tasks.moved_views(load_split(settings, seed).train, settings.n_views, moves)
    looks = [tasks.pose(photographs, look, "digit", torch.Generator()) for look in tasks.LOOKS]
    encoder, schedule, n = new_encoder(settings.encoder, seed=seed), settings.pretraining, len(photographs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = nn.ModuleList(nn.Linear(settings.encoder.hidden_size, 10) for _ in looks)
    shuffle = generator_for(seed, "pretraining order")

    def losses() -> Iterator[Tensor]:
        for _ in range(schedule.epochs):
            orders = [torch.split(torch.randperm(n, generator=shuffle), schedule.batch_size) for _ in looks]
            n_batches = n // schedule.batch_size
            for turn in torch.randperm(n_batches * len(looks), generator=shuffle).tolist():
                which, number = divmod(turn, n_batches)
                batch = looks[which].take(orders[which][number])
                yield nn.functional.cross_entropy(heads[which](encoder(batch.images_NHW)), batch.labels_N)

    descend([*encoder.parameters(), *heads.parameters()], losses(), len(looks) * schedule.steps(n), schedule)
    return encoder


def fit_heads(base: Encoder, data: Mapping[str, Split], settings: DemoSettings) -> dict[str, Head]:
    """Fit the frozen head of every task on its training images."""
    options = {"ridge": settings.ridge, "scale": settings.logit_scale}
    train = {task.name: (data[task.name].train, task.n_classes) for task in TASKS}
    return {name: fit_head(features(base, t.images_NHW), t.labels_N, n, **options) for name, (t, n) in train.items()}


def finetune(expert: Encoder, head: Head, examples: Examples, schedule: DemoSchedule, order: torch.Generator) -> None:
    """Train all weights of a base copy in place on one task, with its frozen head."""
    losses = task_losses(expert, head, examples, schedule, order)
    descend(list(expert.parameters()), losses, schedule.steps(len(examples)), schedule)


def task_losses(
    encoder: Encoder, head: Head, examples: Examples, schedule: DemoSchedule, order: torch.Generator
) -> Iterator[Tensor]:
    """Yield losses of fine-tuning on one task with its frozen head, each computed on demand.

    Args:
        order: generator for the order of the examples.
    """
    for _ in range(schedule.epochs):
        for index_N in torch.split(torch.randperm(len(examples), generator=order), schedule.batch_size):
            if len(index_N) == schedule.batch_size:
                batch = examples.take(index_N)
                yield nn.functional.cross_entropy(head(encoder(batch.images_NHW)), batch.labels_N)


def descend(weights: Sequence[nn.Parameter], losses: Iterable[Tensor], n_steps: int, schedule: DemoSchedule) -> None:
    """Take an AdamW step for every loss."""
    rate = schedule.learning_rate
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=schedule.weight_decay, fused=True)
    for step, loss in enumerate(losses):
        for group in optimizer.param_groups:
            group["lr"] = rate * warm_cosine(step, n_steps)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
