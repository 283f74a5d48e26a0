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
        self._sessions: list[Session] = []

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """See `Executor`."""
        self._forget()
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
        self._forget()
        units = list(units)
        workers = self._resources.workers
        if workers > 1:  # a large unit that comes last, as heads do, would leave the other workers idle
            units.sort(key=lambda unit: unit.traffic, reverse=True)
        spec = dataclasses.replace(spec, room=self._room(units))
        budget = Budget(self._resources.memory)
        stop = threading.Event()

        def work(index: int) -> UnitResult | None:
            if stop.is_set():
                return None
            session = self._session(spec)
            with budget.hold(units[index].host_bytes):
                if stop.is_set():
                    return None
                if index + workers < len(units):
                    session.prefetch(units[index + workers])
                try:
                    return session.merge(units[index])
                except BaseException:  # before another worker takes its next unit
                    stop.set()
                    raise

        with one_thread(), self._pool() as pool:
            try:
                for future in concurrent.futures.as_completed([pool.submit(work, i) for i in range(len(units))]):
                    result = future.result()
                    if result is None:  # skipped after an error, which another future raises
                        continue
                    if result.findings.fatal:
                        for session in self._sessions:
                            session.inspect_only = True
                    yield result
            except BaseException:  # whatever it is (Ctrl-C too): let running units end, start no new ones, pass it on
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _room(self, units: Sequence[Unit]) -> int:
        """What a worker may keep mapped: with so much each, all workers together stay within their memory."""
        largest = sorted((u.host_bytes for u in units), reverse=True)[: self._resources.workers]
        return largest[-1] if largest and sum(largest) <= self._resources.memory else 0

    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(self._resources.workers, "actmat")

    def _session(self, spec: SessionSpec) -> Session:
        """The session of this thread."""
        session = getattr(self._local, "session", None)
        if session is None or session.spec is not spec:
            session = self._local.session = Session(spec, self._inputs, self._writers)
            self._sessions.append(session)
        return session

    def _forget(self) -> None:
        self._sessions.clear()
