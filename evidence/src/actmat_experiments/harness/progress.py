"""Runs of many stages: bars and logs, threads, loads of models, and no chatter of libraries.

Bars show the time that is left per stage and go to the console that a command gives; logs go below the cache,
`logs/<stage>.log`, with a time in every line, and grow over runs: they are read after a long run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from actmat_experiments.core import one_thread


class Stage:
    """One stage while it runs: advance its bar, write to its log."""

    def __init__(self, progress: Progress, task: TaskID, log: Path | None) -> None:
        self._progress, self._task, self._log = progress, task, log

    def advance(self, n: float = 1) -> None:
        """`n` more units are done; from any thread."""
        self._progress.advance(self._task, n)

    def say(self, text: str) -> None:
        """Show the current work at the end of the bar."""
        self._progress.update(self._task, now=text)

    def log(self, text: str) -> None:
        """A line in the stage's log."""
        if self._log is not None:
            stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{stamp} {text}\n")


class Watch:
    """Bars and logs of one run.

    Args:
        console: where bars go; None for no bars.
        logs: folder of the logs; None for no logs.
    """

    def __init__(self, console: Console | None = None, logs: Path | None = None) -> None:
        self.console = console or Console(quiet=True)
        self._logs = logs
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Watch:
        quiet_libraries()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, lines: Iterable[str], most: int = 20) -> None:
        """Print lines, the first of many."""
        every = list(lines)
        for line in every[:most]:
            self.console.print(line, highlight=False, markup=False)
        if len(every) > most:
            self.console.print(f"... and {len(every) - most} more", highlight=False)

    @contextlib.contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Stage]:
        """A bar while the block runs, and a line in the log when it begins, ends or fails."""
        log = None
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"{name.split(':')[0].strip().replace(' ', '-')}.log"
        task = self._progress.add_task(name, total=total, now="")
        stage = Stage(self._progress, task, log)
        began = time.perf_counter()
        stage.log(f"begin  {name}")
        if not self.console.is_terminal:
            self.console.print(f"{name} ...", highlight=False)
        try:
            yield stage
        except BaseException as error:
            stage.log(f"failed {name} after {time.perf_counter() - began:.1f} s: {error!r}")
            raise
        finally:
            self._progress.remove_task(task)
        stage.log(f"end    {name} after {time.perf_counter() - began:.1f} s")
        if not self.console.is_terminal:
            self.console.print(f"{name}: {time.perf_counter() - began:.1f} s", highlight=False)


def quiet_libraries() -> None:
    """No bars and notes of the model libraries for every checkpoint that is loaded: an experiment loads hundreds."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def one_thread_on(device: str) -> contextlib.AbstractContextManager[None]:
    """One thread per operation on a CPU, nothing elsewhere.

    Runs go side by side there; and sums that are split among other numbers of threads would train other weights.
    """
    return one_thread() if device == "cpu" else contextlib.nullcontext()
