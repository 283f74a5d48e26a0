"""Signals that ask a command to end: they stop it as Ctrl-C does, so that finished work is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Stopped", "stopped_by_signals"]


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGHUP, unless they are ignored (`nohup`) or handled already."""
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
    names = known if threading.current_thread() is threading.main_thread() else []
    taken = [n for n in names if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
