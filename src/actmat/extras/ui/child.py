"""The process that does one job of the page: reads it from stdin, tells what happens in lines of JSON on stdout.

A process of its own can be stopped like a command, keeps what it has finished like a command, and leaves the page's
server its memory. SIGTERM stops it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from actmat.errors import MergeError
from actmat.extras.pages.comparison import compare
from actmat.extras.pages.html import write_html
from actmat.extras.pages.html.comparison import write_comparison
from actmat.extras.ui.form import recipe_of, settings_of
from actmat.planning import MergePlan
from actmat.run import diagnose_recipe, run_recipes

INTERVAL_S = 0.1
"""Shortest time between two lines about progress."""

Tell = Callable[..., None]


class _Telling:
    """Tells the progress of a merge; implements `actmat.progress.Progress`."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._done = self._bytes = 0
        self._told = 0.0

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Tell how much there is to do."""
        total = sum(1 for item in plans[0].items if item.action != "tie")
        self._done = resumed
        self._tell("started", total=total, done=resumed, workers=workers, read_bytes=plans[0].read_bytes)

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        with self._lock:
            self._done += 1
            self._bytes += nbytes
            if (now := time.monotonic()) - self._told < INTERVAL_S:
                return
            self._told = now
            self._tell("progress", done=self._done, bytes=self._bytes, name=name)

    def node(self, name: str, nbytes: int) -> None:
        """Do nothing: `tensor` was called."""

    def note(self, text: str) -> None:
        """Pass the sentence on."""
        self._tell("note", text=text)

    def finishing(self) -> None:
        """Tell that only the disk is still at work."""
        self._tell("finishing", done=self._done)


def _merge(job: Mapping[str, Any], tell: Tell) -> None:
    (report,) = run_recipes([recipe_of(job["form"])], settings_of(job["form"]), _Telling(tell))
    page = Path(report.out) / "report.html"
    found = None if report.diagnosis is None else len(report.diagnosis.issues)
    tell(
        "done",
        out=str(report.out),
        seconds=report.seconds,
        was_finished=report.was_finished,
        tensors=len(report.plan.items),
        notes=list(report.plan.notes),
        issues=found,
        page=str(page) if found is not None and page.is_file() else None,
    )


def _diagnose(job: Mapping[str, Any], tell: Tell) -> None:
    found = diagnose_recipe(recipe_of(job["form"]), settings_of(job["form"]), _Telling(tell))
    page = write_html(found, Path(job["page"]))
    tell("done", page=str(page), issues=len(found.issues))


def _compare(job: Mapping[str, Any], tell: Tell) -> None:
    def progress(done: int, total: int) -> None:
        tell("progress", done=done, total=total)

    found = compare(job["first"], job["second"], progress=progress)
    tell("done", page=str(write_comparison(found, Path(job["page"]))), differing=len(found.differing))


JOBS = {"merge": _merge, "diagnose": _diagnose, "compare": _compare}


def main() -> None:
    """Do the job on stdin."""
    signal.signal(signal.SIGTERM, _stop)
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints does not get between the lines

    def tell(event: str, **fields: Any) -> None:
        lines.write(json.dumps({"event": event, **fields}) + "\n")

    job = json.load(sys.stdin.buffer)
    try:
        JOBS[job["do"]](job, tell)
    except MergeError as error:
        tell("failed", headline=error.headline, problems=list(error.problems), notes=getattr(error, "__notes__", []))
    except KeyboardInterrupt as stop:
        tell("stopped", notes=getattr(stop, "__notes__", []))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
