"""Run units on this machine: several threads, each on one unit at a time, within a memory budget.

Every worker runs its linear algebra on one core. Results then cannot depend on how many workers there are (a
threaded BLAS may split sums differently), and two workers scale better than one threaded eigensolver. Units begin in
the order of their planned time, longest first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from actmat.engine.inputs import Inputs
from actmat.engine.memory import Budget
from actmat.engine.observer import SinkSource
from actmat.engine.resources import Resources, one_thread
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Unit, planned_seconds
from actmat.planning.model import Item


class ThreadExecutor:
    """Threads of this process, which share the open inputs and output files.

    Args:
        inputs, writers: as for `Session`.
        resources: number of workers, memory of all together.
    """

    def __init__(self, inputs: Inputs, writers: Sequence[SinkSource], resources: Resources) -> None:
        self._inputs = inputs
        self._writers = writers
        self._resources = resources
        self._local = threading.local()

    @staticmethod
    def device_problem(device: str) -> str | None:
        """See `Executor`."""
        if device == "cpu":
            return None
        return (
            f"computes on the host, and the device is '{device}': several threads would share a device. Leave the "
            "executor out, or the device."
        )

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """See `Executor`."""
        with one_thread(), self._pool() as pool:

            def observe(fork: Callable[[], Any], items: Sequence[Item]) -> list[Any]:
                mine, states = threading.local(), []

                def one(item: Item) -> None:
                    if not hasattr(mine, "state"):
                        mine.state = fork()
                        states.append(mine.state)
                    self._session(spec).observe(item, mine.state)

                for _ in pool.map(one, items):
                    pass
                return states

            return run_surveys(spec.plans, observe)

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """See `Executor`."""
        units = list(units)
        workers = self._resources.workers
        if workers > 1 and not self._resources.in_order:
            units.sort(key=planned_seconds, reverse=True)  # a long unit at the end would leave the other workers idle
        spec = dataclasses.replace(spec, room=room_for(units, self._resources))
        tasks = _Tasks(units, workers, Budget(self._resources.memory), lambda: self._session(spec))
        with one_thread(), self._pool() as pool:
            running = {pool.submit(tasks.merge, i) for i in range(len(units))}
            try:
                for future in concurrent.futures.as_completed(list(running)):
                    result = future.result()
                    running.remove(future)
                    if result is not None:  # skipped after an error, which comes with another unit
                        yield result
            except BaseException as error:  # Ctrl-C too: let running units end, start no new ones, pass it on
                tasks.stop()
                pool.shutdown(cancel_futures=True)
                if not isinstance(error, GeneratorExit):  # results that a later run need not compute again
                    yield from (r for f in running if (r := _finished(f)) is not None)
                raise

    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(self._resources.workers, "actmat")

    def _session(self, spec: SessionSpec) -> Session:
        """The session of this thread."""
        session = getattr(self._local, "session", None)
        if session is None or session.spec is not spec:
            session = self._local.session = Session(spec, self._inputs, self._writers)
        return session


class _Tasks:
    """Units as tasks of a pool of threads.

    Args:
        units: in the order in which they begin.
        workers: number of threads.
        budget: admits units by their memory.
        session: of the thread that asks.
    """

    def __init__(self, units: Sequence[Unit], workers: int, budget: Budget, session: Callable[[], Session]) -> None:
        self._units = units
        self._workers = workers
        self._budget = budget
        self._session = session
        self._stopped, self._failed = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Begin no other unit."""
        self._stopped.set()

    def merge(self, index: int) -> UnitResult | None:
        """Result of a unit; None if it was not begun."""
        if self._stopped.is_set():
            return None
        session, unit = self._session(), self._units[index]
        with self._budget.hold(unit.host_bytes):
            if self._stopped.is_set():
                return None
            if index + self._workers < len(self._units):
                session.prefetch(self._units[index + self._workers])
            session.inspect_only = self._failed.is_set()
            try:
                result = session.merge(unit)
            except BaseException:  # Ctrl-C too: the other threads begin nothing new, the error goes on
                self.stop()
                raise
            if result.findings.fatal:
                self._failed.set()
            return result


def room_for(units: Sequence[Unit], resources: Resources) -> int:
    """Bytes that each worker may keep mapped, so that all workers together stay within their memory."""
    largest = sorted((u.host_bytes for u in units), reverse=True)[: resources.workers]
    return largest[-1] if largest and sum(largest) <= resources.memory else 0


def _finished(future: concurrent.futures.Future[UnitResult | None]) -> UnitResult | None:
    """The result, unless the unit was never run or raised an error."""
    return None if future.cancelled() or future.exception() is not None else future.result()
