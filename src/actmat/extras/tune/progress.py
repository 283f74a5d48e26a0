"""Callbacks that watch merges by inputs and searches: stages with counts, notes, trials."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actmat.foreign import terminal
from actmat.progress import Progress, in_notebook, tensors_to_do, tqdm_bar

if TYPE_CHECKING:
    from actmat.planning import MergePlan


class TuneProgress(Progress):
    """Callbacks for stages; does nothing."""

    def doing(self, what: str, total: int = 0) -> None:
        """A stage begins, of so many parts; 0: unknown."""

    def done(self, parts: int) -> None:
        """So many parts of the stage are done."""

    def note(self, text: str) -> None:
        """A fact that the user should know while the search runs."""

    def trial(self, trial: Any, best: Any) -> None:
        """A `Trial` was made; `best`: of all so far."""


class NotebookTuneProgress(TuneProgress):
    """Shows the stage on a bar of tqdm."""

    def __init__(self) -> None:
        self._bar = tqdm_bar("")

    def doing(self, what: str, total: int = 0) -> None:
        """Show the stage."""
        self._bar.reset(total or None)
        self._bar.set_description(what)

    def done(self, parts: int) -> None:
        """Move the bar."""
        self._bar.update(parts - self._bar.n)
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Print the sentence above the bar."""
        self._bar.write(terminal(text), file=sys.stderr)

    def trial(self, trial: Any, best: Any) -> None:
        """Show the best."""
        self._bar.set_postfix_str(f"best {best.candidate} ({best.mean:.4g})", refresh=False)


class MergingProgress(Progress):
    """Tells of a merge's tensors as a stage; implements `Progress`."""

    def __init__(self, progress: TuneProgress, what: str) -> None:
        self._progress, self._what, self._done = progress, what, 0

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Begin the stage."""
        total, self._done = tensors_to_do(plans, resumed)
        self._progress.doing(self._what, total)

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        self._done += 1
        self._progress.done(self._done)


def usual_tune_progress() -> TuneProgress:
    """The progress of calls that name none: a bar in a notebook, else nothing."""
    return NotebookTuneProgress() if in_notebook() else TuneProgress()
