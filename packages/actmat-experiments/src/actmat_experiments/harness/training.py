"""States of long training runs, so that an interrupted run goes on where it stopped; and the best state of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Resume:
    """The state of a training run on disk, for `descend`: weights, moments, number of steps, in one file.

    Args:
        path: of the file, replaced whole every time.
        every: steps between two states.
    """

    path: Path
    every: int = 500

    def load(self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
        """Put the state back; the number of steps that it holds, 0 without one."""
        if not self.path.is_file():
            return 0
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        _put(state["weights"], parameters)
        optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        """Write the state if it is time."""
        if step % self.every == 0 and step != n_steps:
            self.write(step, parameters, optimiser)

    def write(
        self, step: int, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer, **more: Any
    ) -> None:
        """Replace the state."""
        _write({"step": step, "weights": _values(parameters), "optimiser": optimiser.state_dict(), **more}, self.path)


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
    callback and as what it resumes from.

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

    def load(self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
        """See `Resume`."""
        found = Resume(self.folder / "last.pt").load(parameters, optimiser)
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
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        """See `Resume`. The best weights first: `last.pt` may only speak of a best one that is there."""
        if not self._is_time():
            return
        if self.progress.stale == 0:
            _write({"weights": _values(parameters)}, self.folder / "best.pt")
        Resume(self.folder / "last.pt").write(step, parameters, optimiser, progress=asdict(self.progress))

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
