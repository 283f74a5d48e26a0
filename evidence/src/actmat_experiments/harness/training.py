"""The loop that trains every base and expert: schedules, states of interrupted runs, the best state of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from actmat.extras.demo.tasks import generator_for
from actmat.extras.demo.training import warm_cosine
from actmat_experiments.harness.models import add_adapter
from actmat_experiments.harness.results import Regime

Precision = Literal["float32", "bfloat16", "float16"]
Start = Literal["apart", "shared", "small"]
"""Of LoRA's `A`: drawn for every task; one for all tasks, as scripts with one seed draw it; apart, at `_SMALL` of its
size."""
_SMALL = 0.05
OnStep = Callable[[], object]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Callback(Protocol):
    """Watches a training run, for analyses. Called from the training thread; gradients are those of the batch."""

    def before_step(self, step: int, loss: Tensor) -> None:
        """After `loss.backward()` and clipping, before the optimizer's step."""

    def after_step(self, step: int) -> None:
        """After the optimizer's step."""


class Resumed(Protocol):
    """The state of a training run that is kept from time to time."""

    def load(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Put the state back; the number of steps that it holds, 0 without one."""

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
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
        optimizer: AdamW, or Adafactor, whose steps are relative to the size of each tensor.
        clip: longest gradient; None: as it is.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    warm_up_steps: int | None = None
    micro_batches: int = 1
    constant: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    clip: float | None = 1.0

    def steps(self, n_examples: int) -> int:
        """Optimizer steps of a run."""
        return self.epochs * (n_examples // self.batch_size)

    def rate(self, step: int, n_steps: int) -> float:
        """Learning rate of a step."""
        share = 1.0 if self.constant else warm_cosine(step, n_steps, self.warm_up_steps)
        return self.learning_rate * share

    def optimizer_of(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer, without a state."""
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)


def descend(
    parameters: Sequence[nn.Parameter],
    losses: Callable[[int], Iterator[Tensor | Iterable[Tensor]]],
    n_steps: int,
    schedule: Schedule,
    on_step: OnStep = lambda: None,
    callbacks: Sequence[Callback] = (),
    resume: Resumed | None = None,
) -> None:
    """Minimize a stream of losses, each computed when it is asked for, at the weights of that moment.

    Args:
        losses: the stream from a given step on, one per step: a loss, or the terms that add up to it, for batches that
            do not fit the memory; each term is computed, and its gradient taken, before the next one. The run ends with
            the stream, if that ends first.
        on_step: called after every step, for progress.
    """
    optimizer = schedule.optimizer_of(parameters)
    first = resume.load(parameters, optimizer) if resume else 0
    for _ in range(first):
        on_step()
    for step, terms in zip(range(first, n_steps), losses(first), strict=False):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, n_steps)
        total = torch.zeros(())
        for term in (terms,) if isinstance(terms, Tensor) else terms:
            torch.autograd.backward(term)
            total = total + term.detach().cpu()
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(parameters, schedule.clip)
        for callback in callbacks:
            callback.before_step(step, total)
        optimizer.step()
        for callback in callbacks:
            callback.after_step(step)
        on_step()
        if resume:
            resume.keep(step + 1, n_steps, parameters, optimizer)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """`work` on every item, each in a thread that computes with one thread, or one by one in the caller's; the first
    error is raised.
    """
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Resume:
    """The state of a training run on disk, for `descend`: weights, moments, number of steps, in one file.

    Args:
        path: of the file, replaced whole every time.
        every: steps between two states.
    """

    path: Path
    every: int = 500

    def load(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Put the state back; the number of steps that it holds, 0 without one."""
        if not self.path.is_file():
            return 0
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        _put(state["weights"], parameters)
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Write the state if it is time."""
        if step % self.every == 0 and step != n_steps:
            self.write(step, parameters, optimizer)

    def write(
        self, step: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, **more: Any
    ) -> None:
        """Replace the state."""
        _write({"step": step, "weights": _values(parameters), "optimizer": optimizer.state_dict(), **more}, self.path)


@dataclass(slots=True)
class Progress:
    """State of a run that ends by its validations.

    Args:
        update: steps so far.
        best: highest validation score so far; -1 before the first validation.
        best_update: when that was.
        stale: validations since then.
    """

    update: int = 0
    best: float = -1.0
    best_update: int = 0
    stale: int = 0


@dataclass(slots=True)
class Selection:
    """Validates a run now and then, keeps its best weights, ends it when they are no longer beaten; for `descend` as a
    callback and as its state to resume from.

    Args:
        folder: of the state, `last.pt`, and of the best weights, `best.pt`; written at every validation.
        parameters: that are trained.
        score: of the model as it is, on validation data.
        every: steps between two validations.
        last: number of the last step.
        patience: the run ends after so many validations without a new best one.
        on_update: called after every step.
    """

    folder: Path
    parameters: Sequence[nn.Parameter]
    score: Callable[[], float]
    every: int
    last: int
    patience: int
    on_update: Callable[[Progress], object] = lambda progress: None
    progress: Progress = field(default_factory=Progress)

    def load(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """See `Resume`."""
        found = Resume(self.folder / "last.pt").load(parameters, optimizer)
        if found:
            self.progress = Progress(**torch.load(self.folder / "last.pt", weights_only=True)["progress"])
        return found

    def before_step(self, step: int, loss: Tensor) -> None:
        """See `Callback`."""

    def after_step(self, step: int) -> None:
        """See `Callback`: validate if it is time."""
        progress = self.progress
        progress.update = step + 1
        if self._is_time():
            score = self.score()
            if score > progress.best:
                progress.best, progress.best_update, progress.stale = score, progress.update, 0
            else:
                progress.stale += 1
        self.on_update(progress)

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """See `Resume`. The best weights first: `last.pt` may only speak of a best one that is there."""
        if not self._is_time():
            return
        if self.progress.stale == 0:
            _write({"weights": _values(parameters)}, self.folder / "best.pt")
        Resume(self.folder / "last.pt").write(step, parameters, optimizer, progress=asdict(self.progress))

    @property
    def ended(self) -> bool:
        """True if the best weights have not been beaten for too long."""
        return self.progress.stale >= self.patience

    def restore_best(self) -> None:
        """Put the best weights into the model."""
        if (self.folder / "best.pt").is_file():
            _put(torch.load(self.folder / "best.pt", map_location="cpu", weights_only=True)["weights"], self.parameters)

    def _is_time(self) -> bool:
        return self.progress.update % self.every == 0 or self.progress.update == self.last


def order_of(n: int, schedule: Schedule, seed: int, name: str, first: int = 0) -> Iterator[Tensor]:
    """Positions of each step's examples among `n`, from step `first` on; every epoch has an order of its own.

    >>> [positions.tolist() for positions in order_of(4, Schedule(1, 2, 1e-3), seed=0, name="task")]
    [[3, 1], [0, 2]]
    """
    per_epoch = n // schedule.batch_size
    for step in range(first, schedule.epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(n, generator=generator_for(seed, f"order {name} {epoch}"))
        yield order[place * schedule.batch_size : (place + 1) * schedule.batch_size]


@dataclass(frozen=True, slots=True)
class Training:
    """Training of an expert.

    Args:
        name: of the task; with the seed it decides the order of examples and the start of the factors.
        regime: all weights that a suite trains, or LoRA on all linear layers without dropout.
        alpha: of LoRA; 0: the rank.
        start: of LoRA's `A`.
        precision: of the forward pass (autocast); weights and moments stay float32.
        save_every: steps between two states.
    """

    name: str
    seed: int
    schedule: Schedule
    regime: Regime = "full"
    rank: int = 16
    alpha: int = 0
    device: str = "cpu"
    precision: Precision = "float32"
    save_every: int = 500
    start: Start = "apart"


def trainable(model: Any, how: Training, trained: Callable[[str], bool] = lambda name: True) -> Any:
    """The model where it will be trained: with LoRA factors, or with some of its weights set to be trained.

    Args:
        trained: whether full fine-tuning trains the parameter of a name.
    """
    if how.regime == "lora":
        drawn = generator_for(how.seed, "factors" if how.start == "shared" else f"factors {how.name}")
        model = add_adapter(model, how.rank, drawn, how.alpha, size=_SMALL if how.start == "small" else 1.0)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained(name))
    return model.to(how.device)


def train_by(
    model: Any,
    loss: Callable[[Tensor], Tensor | Iterable[Tensor]],
    n: int,
    how: Training,
    out: Path,
    on_step: OnStep = lambda: None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train the weights of a model that need a gradient, and write it as transformers or PEFT do.

    A run that was interrupted goes on from its last state, `state.pt` in `out`; with callbacks it begins again, since
    they have to see all of it.

    Args:
        loss: of the examples at some positions, or the terms that add up to it.
        n: number of examples.
        callbacks: analyses of the run.
    """
    parameters, state = [p for p in model.parameters() if p.requires_grad], out / "state.pt"
    resume = None if callbacks else Resume(state, how.save_every)

    def losses(first: int) -> Iterator[Tensor | Iterable[Tensor]]:
        return map(loss, order_of(n, how.schedule, how.seed, how.name, first))

    descend(parameters, losses, how.schedule.steps(n), how.schedule, on_step, callbacks, resume)
    model.to("cpu").save_pretrained(out)
    state.unlink(missing_ok=True)


def _values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach() for parameter in parameters]


def _put(weights: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def _write(state: dict[str, Any], path: Path) -> None:
    aside = path.with_suffix(".new")
    torch.save(state, aside)
    aside.replace(path)
