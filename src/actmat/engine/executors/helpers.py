"""Workers without a unit of their own take panels of units that others merge (`linalg.panels`).

Those of a unit that takes longer than its share of the whole run come before units that have not begun.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actmat.engine.memory import Budget
from actmat.planning.cost import MATRIX_BYTES

PATIENCE = 0.05
"""Seconds after which a helper asks again for memory that was not free."""


class _Shared:
    """Panels of one computation: those not started, and the number that helpers are computing."""

    def __init__(self, panels: Sequence[Callable[[], None]], nbytes: int, *, first: bool) -> None:
        self.left = deque(panels)
        self.first = first
        self.nbytes = nbytes
        self.helped = 0
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class HelpersOfUnit:
    """The helpers of one unit; see `linalg.panels.Helpers`.

    Args:
        idle: all helpers.
        first: see `IdleWorkers.share`.
    """

    idle: IdleWorkers
    first: bool

    def share(self, panels: Sequence[Callable[[], None]], nbytes: int) -> None:
        """Run all panels."""
        self.idle.share(panels, nbytes, first=self.first)


class IdleWorkers:
    """Threads that run out of units, and the panels on which they may help; see `linalg.panels.Helpers`.

    Args:
        budget: a helper computes a panel only while the memory for it is free, and never waits for it with memory in
            hand, so that it keeps no unit from starting.
        units: number of units after whose end nobody has panels to share.
    """

    def __init__(self, budget: Budget, units: int) -> None:
        self._budget = budget
        self._units = units
        self._open: list[_Shared] = []
        self._change = threading.Condition()

    def share(self, panels: Sequence[Callable[[], None]], nbytes: int, *, first: bool = False) -> None:
        """Run all panels, on this thread and on those that help; the first error of any is raised.

        Args:
            first: workers with units to do help as well, before they begin the next.
        """
        shared = _Shared(panels, nbytes + MATRIX_BYTES, first=first)
        with self._change:
            self._open.append(shared)
            self._change.notify_all()
        try:
            while (panel := self._next(shared)) is not None:
                panel()
        finally:  # helpers write to memory that belongs to this thread: wait for them in any case
            with self._change:
                shared.left.clear()
                self._open.remove(shared)
                self._change.wait_for(lambda: not shared.helped)
        if shared.error is not None:
            raise shared.error

    def help_first(self) -> None:
        """Compute panels of units that come first, as long as there are any and memory is free."""
        while (shared := self._pressing()) is not None:
            with self._budget.try_hold(shared.nbytes) as granted:
                if not granted:
                    return
                self._one(shared)

    def help(self) -> None:
        """Compute panels of others until all units have ended."""
        while (shared := self._wait()) is not None:
            with self._budget.try_hold(shared.nbytes) as granted:
                if granted:
                    self._one(shared)
            if not granted:
                with self._change:
                    self._change.wait(PATIENCE)

    def unit_ended(self) -> None:
        """Count a unit that has ended, well or not."""
        with self._change:
            self._units -= 1
            self._change.notify_all()

    def close(self) -> None:
        """Send all helpers home: units that have not started never will."""
        with self._change:
            self._units = 0
            self._change.notify_all()

    def _pressing(self) -> _Shared | None:
        with self._change:
            return next((s for s in self._open if s.left and s.first), None) if self._units > 0 else None

    def _wait(self) -> _Shared | None:
        """A computation with panels left, once there is one; None when all units have ended."""
        with self._change:
            self._change.wait_for(lambda: self._units <= 0 or any(s.left for s in self._open))
            return None if self._units <= 0 else next(s for s in self._open if s.left)

    def _one(self, shared: _Shared) -> None:
        """Compute one panel, unless the last has been taken."""
        with self._change:
            if not shared.left:
                return
            panel = shared.left.popleft()
            shared.helped += 1
        try:
            panel()
        except BaseException as error:  # noqa: BLE001 - raised where the panels came from
            shared.error = shared.error or error
        finally:
            with self._change:
                shared.helped -= 1
                self._change.notify_all()

    def _next(self, shared: _Shared) -> Callable[[], None] | None:
        with self._change:
            return shared.left.popleft() if shared.left and shared.error is None else None
