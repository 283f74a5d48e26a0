"""`Progress`: callbacks of a running merge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from actmat.plugins import load

if TYPE_CHECKING:
    from actmat.planning import MergePlan


class Progress(Protocol):
    """Callbacks of a running merge."""

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Plans are made; `resumed` tensors of an interrupted run are taken over."""

    def tensor(self, name: str, nbytes: int) -> None:
        """One tensor is done; called from any thread."""

    def node(self, name: str, nbytes: int) -> None:
        """A node of a cluster has done one tensor more; follows `tensor`. Not called for work on this machine only."""

    def note(self, text: str) -> None:
        """A sentence about the run for the user, such as a worker that was lost and replaced."""

    def finishing(self) -> None:
        """All tensors are done; flushing to disk and renaming follow."""


class NoProgress:
    """Ignores all calls: the default."""

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Do nothing."""

    def tensor(self, name: str, nbytes: int) -> None:
        """Do nothing."""

    def node(self, name: str, nbytes: int) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def finishing(self) -> None:
        """Do nothing."""


def in_notebook() -> bool:
    """True in a kernel of Jupyter, whose front end shows HTML; false in a terminal, IPython's included.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def usual_progress(doing: str = "merging") -> Progress:
    """The progress of calls that name none: in a notebook the plug-in of `actmat.progress`, else nothing."""
    shown = load("actmat.progress", "notebook") if in_notebook() else None
    progress: Progress = NoProgress() if shown is None else shown(doing)
    return progress
