"""Progress in notebooks: one line with a bar, replaced in place; plain HTML, without widgets."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from actmat.foreign import html, terminal
from actmat.progress import NoProgress

if TYPE_CHECKING:
    from actmat.planning import MergePlan

SECONDS = 0.2
"""Between two updates of a line at least: a notebook keeps every message until it is saved."""


class NotebookLine:
    """A line of output that is replaced in place. Thread-safe."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0
        self._lock = threading.Lock()

    def show(self, text: str, share: float | None = None, *, now: bool = False) -> None:
        """Replace the line.

        Args:
            text: in words; foreign names in it are made safe.
            share: of the work that is done; None: no bar.
            now: also shortly after the update before.
        """
        with self._lock:
            if not now and time.monotonic() - self._shown < SECONDS:
                return
            self._shown = time.monotonic()
            bar = Markup("")
            if share is not None:
                bar = Markup('<progress value="{:.4f}" max="1"></progress> ').format(share)
            data = {
                "text/plain": terminal(text),
                "text/html": str(Markup("<div>{}<code>{}</code></div>").format(bar, html(text))),
            }
            if self._handle is None:
                display: Any = importlib.import_module("IPython.display")
                self._handle = display.display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)


class NotebookProgress(NoProgress):
    """Shows a merge on a line of a notebook; implements `Progress`."""

    def __init__(self, doing: str = "merging") -> None:
        self._doing = doing
        self._line = NotebookLine()
        self._done = self._total = 0
        self._began = time.monotonic()

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Show the bar."""
        self._total = sum(item.action != "tie" for item in plans[0].items)
        self._done = min(resumed // len(plans), self._total)
        self._began = time.monotonic()
        self._show(now=True)

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        self._done += 1
        self._show(now=self._done == self._total)

    def note(self, text: str) -> None:
        """Show the sentence on a line of its own."""
        NotebookLine().show(text, now=True)

    def _show(self, *, now: bool) -> None:
        seconds = time.monotonic() - self._began
        text = f"{self._doing}: {self._done} of {self._total} tensors, {seconds:.0f} s"
        self._line.show(text, self._done / max(1, self._total), now=now)
