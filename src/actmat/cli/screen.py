"""Output of commands: consoles for stdout and stderr, progress bars, JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from actmat.plan import MergePlan

__all__ = ["MergeProgress", "console", "counting", "note_console", "print_json"]

console = Console(highlight=False)
note_console = Console(stderr=True, highlight=False)


class MergeProgress:
    """A bar over the bytes of a merge, on stderr; implements `actmat.api.Progress`."""

    def __init__(self, doing: str = "merging") -> None:
        self._doing = doing
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            MofNCompleteColumn(),
            TextColumn("tensors"),
            TimeRemainingColumn(),
            console=note_console,
            transient=True,
            disable=not note_console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> MergeProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Show the bar; say so when an interrupted run goes on."""
        total = sum(1 for t in plans[0].items if t.action != "tie")
        if resumed:
            note_console.print(f"Going on with an interrupted merge: {resumed} tensors are done and intact.")
        self._task = self._bar.add_task(self._doing, total=total, completed=min(resumed // len(plans), total))

    def tensor(self, name: str, nbytes: int) -> None:
        """Advance the bar by one tensor."""
        if self._task is not None:
            self._bar.advance(self._task)

    def finishing(self) -> None:
        """Show that only the disk is still at work."""
        if self._task is not None:
            self._bar.update(self._task, description="flushing")


@contextlib.contextmanager
def counting(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that counts tensors; yields a function of (done, total) that advances it."""
    with Progress(console=note_console, transient=True, disable=not note_console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    typer.echo(json.dumps(data, indent=1))
