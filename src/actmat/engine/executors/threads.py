"""Run units on this machine: threads within a memory budget, on the host and on devices.

Every worker runs its linear algebra on one core. Results then cannot depend on how many workers there are (a
threaded BLAS may split sums differently), and two workers scale better than one threaded eigensolver. Units begin in
the order of their planned time, longest first.

The plan says which units a device merges. While one core reads, hashes and writes a unit, the device is idle: as many
threads as on the host feed the devices in turn, and each admits units as long as their planned memory fits it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from actmat.engine.devices import open_devices
from actmat.engine.inputs import Inputs
from actmat.engine.memory import MemoryBudget
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources, one_thread
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Unit
from actmat.planning.model import Item


class ThreadExecutor:
    """Threads of this process, which share the open inputs and output files.

    Args:
        inputs, writers: as for `Session`.
        resources: number of workers and memory of the host; names of the devices and the memory of each.
    """

    def __init__(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> None:
        self._inputs = inputs
        self._writers = writers
        self._resources = resources
        self._devices = [(d, MemoryBudget(resources.device_memory)) for d in open_devices(resources.device)]
        self._local = threading.local()
        self._budget = MemoryBudget(resources.memory)
        self._stopped, self._failed = threading.Event(), threading.Event()
        if self._devices:  # torch loads a library on its first use, by one thread only
            torch.linalg.cholesky(torch.eye(1, device=self._devices[0][0].torch_device))

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """See `Executor`."""
        with one_thread(), self._pools() as (host, devices):

            def observe(fork: Callable[[], Any], items: Sequence[Item]) -> list[Any]:
                mine, states = threading.local(), []

                def one(item: Item) -> None:
                    if not hasattr(mine, "state"):
                        mine.state = fork()
                        states.append(mine.state)
                    self._session(spec).observe(item, mine.state)

                futures = [(devices if item.cost.device_bytes else host).submit(one, item) for item in items]
                try:
                    for future in futures:
                        future.result()
                finally:
                    for future in futures:
                        future.cancel()
                return states

            return run_surveys(spec.plans, observe)

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """See `Executor`.

        Raises:
            MergeError: a device runs out of memory.
        """
        workers, devices = self._resources.workers, self._feeders
        if workers + devices > 1:  # a long one at the end would leave others idle
            units = sorted(units, key=lambda unit: unit.seconds, reverse=True)
        here = [u for u in units if not (u.device_bytes and devices)]
        moved = [u for u in units if u.device_bytes and devices]
        spec = dataclasses.replace(spec, room=room_for(here, self._resources))
        with one_thread(), self._pools() as (on_host, on_device):
            running = {on_host.submit(self._merge, spec, here, n, workers) for n in range(len(here))}
            running |= {on_device.submit(self._merge, spec, moved, n, devices) for n in range(len(moved))}
            try:
                for future in concurrent.futures.as_completed(list(running)):
                    result = future.result()
                    running.remove(future)
                    if result is not None:  # skipped after an error, which comes with another unit
                        yield result
            except BaseException as error:  # Ctrl-C too: let running units end, start no new ones, pass it on
                self._stopped.set()
                for pool in (on_host, on_device):
                    pool.shutdown(cancel_futures=True)
                if not isinstance(error, GeneratorExit):  # results that a later run need not compute again
                    done = (f for f in running if not f.cancelled() and f.exception() is None)
                    yield from (r for f in done if (r := f.result()) is not None)
                raise

    def _merge(self, spec: SessionSpec, units: Sequence[Unit], n: int, workers: int) -> UnitResult | None:
        """Result of a unit; None if it was not begun.

        Args:
            spec: of the session of this thread.
            units: all units of the same workers, in the order in which they begin.
            n: position of the unit.
            workers: their number.
        """
        unit = units[n]
        device_budget: MemoryBudget | None = getattr(self._local, "device_budget", None)
        on_device = device_budget.hold(unit.device_bytes) if device_budget is not None else contextlib.nullcontext()
        if self._stopped.is_set():
            return None
        with self._budget.hold(unit.host_bytes), on_device:
            if self._stopped.is_set():
                return None
            session = self._session(spec)
            if n + workers < len(units):
                session.prefetch(units[n + workers])
            session.inspect_only = self._failed.is_set()
            try:
                result = session.merge(unit)
            except BaseException:  # Ctrl-C too: the other threads begin nothing new, the error goes on
                self._stopped.set()
                raise
            if result.findings.fatal:
                self._failed.set()
            return result

    @property
    def _feeders(self) -> int:
        """Threads that feed the devices."""
        return max(self._resources.workers, len(self._devices)) if self._devices else 0

    @contextlib.contextmanager
    def _pools(self) -> Iterator[tuple[concurrent.futures.Executor, concurrent.futures.Executor]]:
        """Threads of the host, and threads that feed the devices; without devices, the host's threads twice."""
        turns = itertools.cycle(self._devices)

        def claim() -> None:
            self._local.device, self._local.device_budget = next(turns)

        make = concurrent.futures.ThreadPoolExecutor
        with contextlib.ExitStack() as stack:
            host = stack.enter_context(make(self._resources.workers, "actmat"))
            yield host, stack.enter_context(make(self._feeders, "actmat", claim)) if self._devices else host

    def _session(self, spec: SessionSpec) -> Session:
        """The session of this thread."""
        session = getattr(self._local, "session", None)
        if session is None or session.spec is not spec:
            session = Session(spec, self._inputs, self._writers, getattr(self._local, "device", None))
            self._local.session = session
        return session


def room_for(units: Sequence[Unit], resources: Resources) -> int:
    """Bytes that each worker may keep mapped, so that all workers together stay within their memory."""
    largest = sorted((u.host_bytes for u in units), reverse=True)[: resources.workers]
    return largest[-1] if largest and sum(largest) <= resources.memory else 0
