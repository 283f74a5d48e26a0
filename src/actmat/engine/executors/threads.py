"""Run units on this machine: several threads, each on one unit at a time, within a memory budget.

Every worker runs its linear algebra on one core. Results then cannot depend on how many workers there are (a
threaded BLAS may split sums differently), and two workers scale better than one threaded eigensolver.
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
from actmat.engine.session import Session, SessionSpec, SurveyKey, UnitResult
from actmat.engine.survey import run_surveys
from actmat.engine.units import Unit
from actmat.plan.model import Item

__all__ = ["ThreadExecutor"]


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

            return run_surveys(spec, observe)

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """See `Executor`."""
        units = list(units)
        workers = self._resources.workers
        if (
            workers > 1 and not self._resources.in_order
        ):  # a large unit that comes last, as heads do, would leave the other workers idle
            units.sort(key=lambda unit: unit.traffic, reverse=True)
        spec = dataclasses.replace(spec, room=self._room(units))
        budget = Budget(self._resources.memory)
        stop, failed = threading.Event(), threading.Event()

        def work(index: int) -> UnitResult | None:
            if stop.is_set():
                return None
            session = self._session(spec)
            with budget.hold(units[index].host_bytes):
                if stop.is_set():
                    return None
                if index + workers < len(units):
                    session.prefetch(units[index + workers])
                session.inspect_only = failed.is_set()
                try:
                    result = session.merge(units[index])
                except BaseException:  # Ctrl-C too: the other threads begin nothing new, the error goes on
                    stop.set()
                    raise
                if result.findings.fatal:
                    failed.set()
                return result

        with one_thread(), self._pool() as pool:
            running = {pool.submit(work, i) for i in range(len(units))}
            try:
                for future in concurrent.futures.as_completed(list(running)):
                    result = future.result()
                    running.remove(future)
                    if result is not None:  # skipped after an error, which comes with another unit
                        yield result
            except BaseException as error:  # Ctrl-C too: let running units end, start no new ones, pass it on
                stop.set()
                pool.shutdown(cancel_futures=True)
                if not isinstance(error, GeneratorExit):  # results that a later run need not compute again
                    yield from (r for f in running if (r := _finished(f)) is not None)
                raise

    def _room(self, units: Sequence[Unit]) -> int:
        """Bytes that each worker may keep mapped, so that all workers together stay within their memory."""
        largest = sorted((u.host_bytes for u in units), reverse=True)[: self._resources.workers]
        return largest[-1] if largest and sum(largest) <= self._resources.memory else 0

    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(self._resources.workers, "actmat")

    def _session(self, spec: SessionSpec) -> Session:
        """The session of this thread."""
        session = getattr(self._local, "session", None)
        if session is None or session.spec is not spec:
            session = self._local.session = Session(spec, self._inputs, self._writers)
        return session


def _finished(future: concurrent.futures.Future[UnitResult | None]) -> UnitResult | None:
    """The result, unless the unit was never run or raised an error."""
    return None if future.cancelled() or future.exception() is not None else future.result()
