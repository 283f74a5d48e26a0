"""Observers that make trouble in the processes of workers: one dies, all are slow; elsewhere they do nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actmat.engine.observer import ObservedMerge
from actmat.planning.model import Item


@dataclass(frozen=True)
class Trouble:
    """Makes observers that measure nothing.

    Args:
        folder: shared by all processes; a file per item tells which process began it.
        what: `kill`: the first worker that begins an item dies, once; `kill always`: every worker that begins the item
            `item`; `pause`: every item takes `seconds`.
        item: see `kill always`.
        seconds: see `pause`.
        driver: process that is spared.
    """

    folder: Path
    what: Literal["kill", "kill always", "pause"]
    item: str = ""
    seconds: float = 0.25
    driver: int = field(default_factory=os.getpid)

    def __call__(self, item: Item) -> Silent:
        """Make the trouble, at the beginning of an item."""
        if os.getpid() != self.driver:
            self._begin(item.name)
        return Silent()

    def begun(self) -> dict[str, list[str]]:
        """Process -> items that it began."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.folder.glob("item-*")):
            _, process, name = path.name.split("-", 2)
            found.setdefault(process, []).append(name)
        return found

    def first(self) -> str:
        """The process that this worker takes for the first one; the same for all."""
        path, own = self.folder / "first", self.folder / f"own-{os.getpid()}"
        own.write_text(str(os.getpid()))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(own)
        return path.read_text()

    def _begin(self, name: str) -> None:
        (self.folder / f"item-{os.getpid()}-{name}").touch()
        is_first = self.first() == str(os.getpid())
        if (self.what == "kill" and is_first) or (self.what == "kill always" and name == self.item):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "pause":
            time.sleep(self.seconds)


class Silent:
    """Measures nothing."""

    def region(self, merged: ObservedMerge) -> None:
        """Do nothing."""

    def finish(self) -> dict[str, Any]:
        """Give nothing."""
        return {}
