"""`Progress`: callbacks of a running call."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from actmat.foreign import terminal


class Progress:
    """Callbacks of a running call, which do nothing: the default."""

    def doing(self, what: str, total: int = 0) -> None:
        """A stage begins, of so many parts; 0: unknown. Parts of a merge are its tensors."""

    def done(self, parts: int) -> None:
        """So many parts of the stage are done; called from any thread."""

    def note(self, text: str) -> None:
        """A sentence about the run for the user, such as a worker that was lost and replaced."""

    def trial(self, latest: Any, best: Any) -> None:
        """`actmat.tune` made a `Trial`; `best`: of all so far."""


def in_notebook() -> bool:
    """True in a kernel of Jupyter, whose front end shows HTML; false in a terminal, IPython's included.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookProgress(Progress):
    """Shows the stage on a bar of tqdm: a widget where the notebook has ipywidgets, else text."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets it warns that it shows text
            from tqdm.auto import tqdm
        self._bar = tqdm(miniters=1)

    def doing(self, what: str, total: int = 0) -> None:
        """Show the stage."""
        self._bar.reset(total or None)
        self._bar.set_description(what)

    def done(self, parts: int) -> None:
        """Move the bar."""
        self._bar.update(parts - self._bar.n)
        if parts == self._bar.total:
            self._bar.refresh()

    def note(self, text: str) -> None:
        """Print the sentence above the bar."""
        self._bar.write(terminal(text), file=sys.stderr)

    def trial(self, trial: Any, best: Any) -> None:
        """Show the best."""
        self._bar.set_postfix_str(f"best {best.candidate} ({best.mean:.4g})", refresh=False)


def usual_progress() -> Progress:
    """Default progress of a call: a bar in a notebook, else nothing."""
    return NotebookProgress() if in_notebook() else Progress()
