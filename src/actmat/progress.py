"""`Progress`: what a caller is told while a merge runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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
