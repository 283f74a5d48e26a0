"""`Progress`: callbacks of a running merge."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actmat.foreign import terminal

if TYPE_CHECKING:
    from actmat.planning import MergePlan


class Progress:
    """Callbacks of a running merge, which do nothing: the default."""

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Plans are made; `resumed` tensors of an interrupted run are reused."""

    def tensor(self, name: str, nbytes: int) -> None:
        """One tensor is done; called from any thread."""

    def note(self, text: str) -> None:
        """A sentence about the run for the user, such as a worker that was lost and replaced."""

    def finishing(self) -> None:
        """All tensors are done; flushing to disk and renaming follow."""


def in_notebook() -> bool:
    """True in a kernel of Jupyter, whose front end shows HTML; false in a terminal, IPython's included.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def tensors_to_do(plans: Sequence[MergePlan], resumed: int) -> tuple[int, int]:
    """Numbers of tensors of a merge and of those that are done already, for `Progress.started`."""
    total = sum(item.action != "tie" for item in plans[0].items)
    return total, min(resumed // len(plans), total)


def tqdm_bar(doing: str, **options: Any) -> Any:
    """A bar of tqdm: a widget where the notebook has ipywidgets, else text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets it warns that it shows text
        from tqdm.auto import tqdm
    return tqdm(desc=doing, **options)


class NotebookProgress(Progress):
    """Shows a merge on a bar of tqdm."""

    def __init__(self, doing: str = "merging") -> None:
        self._doing = doing
        self._bar: Any = None

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Show the bar."""
        total, done = tensors_to_do(plans, resumed)
        self._bar = tqdm_bar(self._doing, total=total, initial=done, unit="tensor")

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        self._bar.update()
        if self._bar.n >= self._bar.total:
            self._bar.close()

    def note(self, text: str) -> None:
        """Print the sentence above the bar."""
        self._bar.write(terminal(text), file=sys.stderr)


def usual_progress(doing: str = "merging") -> Progress:
    """Default progress of a call: a bar in a notebook, else nothing."""
    return NotebookProgress(doing) if in_notebook() else Progress()
