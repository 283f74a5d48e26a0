"""Run units on the devices of this machine: one worker per device, and threads on the host for what the host merges.

    files -> reader thread -> pinned blocks -> copies up -> deltas, method, sum with the base -> copies down -> files

One worker uses a device at a time, so no two units compete for its memory: units (or batches of small ones, see
`lockstep`) run on it one after the other, while the bytes of the next are read and copied up (`staging`). The plan says
which units run where; a unit goes to the next free device that has room for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actmat.engine.devices.device import Device, open_devices
from actmat.engine.devices.staging import Staging
from actmat.engine.executors.batches import Batch, batches_of
from actmat.engine.executors.lockstep import in_lockstep
from actmat.engine.executors.threads import room_for
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Budget
from actmat.engine.observer import SinkSource
from actmat.engine.resources import Resources, one_thread
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Unit, planned_seconds
from actmat.errors import MEMORY_MESSAGES, MergeError, format_size
from actmat.planning.model import Item


class DeviceExecutor:
    """Devices of this machine, and threads for what the plan leaves to the host.

    Args:
        inputs, writers: as for `Session`.
        resources: threads and memory of the host; names and memory of the devices.
        devices: instead of those that the resources name.
    """

    def __init__(
        self,
        inputs: Inputs,
        writers: Sequence[SinkSource],
        resources: Resources,
        devices: Sequence[Device] | None = None,
    ) -> None:
        self._inputs = inputs
        self._writers = writers
        self._resources = resources
        self._devices = open_devices(resources.device, resources.device_memory) if devices is None else list(devices)

    @staticmethod
    def device_problem(device: str) -> str | None:
        """See `Executor`."""
        return "needs devices; give --device, such as cuda." if device == "cpu" else None

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """See `Executor`. Deltas have the same bits on host and devices, and what is counted are integers."""

        def observe(fork: Callable[[], Any], items: Sequence[Item]) -> list[Any]:
            on_device = deque(i for i in items if i.cost.device_bytes)
            on_host = deque(i for i in items if not i.cost.device_bytes)

            def work(session: Session, waiting: deque[Item]) -> Any:
                state = fork()
                with contextlib.suppress(IndexError):  # the other workers took the last
                    while True:
                        session.observe(waiting.popleft(), state)
                return state

            def on(device: Device) -> Any:
                device.activate()
                with Staging(device) as staging:
                    return work(self._session(spec, staging), on_device)

            lanes: list[Callable[[], Any]] = [partial(on, d) for d in self._devices if on_device]
            lanes += [lambda: work(self._session(spec), on_host)] * self._resources.workers
            with concurrent.futures.ThreadPoolExecutor(len(lanes), "actmat") as pool:
                futures = [pool.submit(lane) for lane in lanes]
                done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
                if any(f.exception() for f in done):
                    on_device.clear()
                    on_host.clear()
            return [f.result() for f in futures]

        with one_thread():
            return run_surveys(spec.plans, observe)

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """See `Executor`.

        Raises:
            MergeError: no device has room for a unit, or one runs out of memory.
        """
        ordered = list(units) if self._resources.in_order else sorted(units, key=planned_seconds, reverse=True)
        spec = dataclasses.replace(spec, room=room_for([u for u in units if not u.device_bytes], self._resources))
        moved = [u for u in ordered if u.device_bytes]
        rooms = {d.name: d.usable_bytes(d.free_bytes()) for d in self._devices}
        _check_rooms(moved, rooms)
        least, in_order = min(rooms.values(), default=0), self._resources.in_order
        run = _Run(
            host=deque(u for u in ordered if not u.device_bytes),
            device=deque(batches_of(moved, spec.plans, len(self._devices), least, in_order=in_order)),
            budget=Budget(self._resources.memory),
        )
        lanes = [partial(self._use_device, run, d, spec, rooms[d.name]) for d in self._devices if moved]
        lanes += [partial(self._use_host, run, spec)] * (self._resources.workers if run.host else 0)
        with one_thread():
            threads = [threading.Thread(target=run.guard, args=(lane,), name="actmat") for lane in lanes]
            for thread in threads:
                thread.start()
            try:
                yield from run.results_of(len(threads))
            except BaseException as error:  # Ctrl-C too: let running units end, start no new ones, pass it on
                run.stop.set()
                for thread in threads:
                    thread.join()
                if not isinstance(error, GeneratorExit):  # results that a later run need not compute again
                    yield from run.finished()
                raise

    def _use_host(self, run: _Run, spec: SessionSpec) -> None:
        """Merge on the host what is left to it."""
        session = self._session(spec)
        while (unit := run.take_for_host()) is not None:
            with run.budget.hold(unit.host_bytes):
                if run.host:
                    session.prefetch(run.host[0])
                run.merge(session, unit)

    def _use_device(self, run: _Run, device: Device, spec: SessionSpec, room: int) -> None:
        """Merge on a device, one batch after the other; the bytes of the next are read meanwhile."""
        device.activate()
        with Staging(device) as staging:
            sessions: list[Session] = []

            def prefetched() -> Batch | None:
                batch = run.take_for_device(room)
                while batch is not None and len(sessions) < len(batch):
                    sessions.append(self._session(spec, staging))
                for session, unit in zip(sessions, batch or (), strict=False):
                    session.prefetch(unit)
                return batch

            batch = prefetched()
            while batch is not None and not run.stop.is_set():
                following = prefetched()
                with run.budget.hold(sum(unit.host_bytes for unit in batch)):
                    in_lockstep([partial(run.merge, s, u, device) for s, u in zip(sessions, batch, strict=False)])
                batch = following
            for session in sessions:
                session.forget()

    def _session(self, spec: SessionSpec, staging: Staging | None = None) -> Session:
        return Session(dataclasses.replace(spec, device="cpu"), self._inputs, self._writers, staging)


@dataclass
class _Run:
    """State that the workers of one run share.

    Args:
        host, device: units that wait for the host, and batches that wait for a device.
        budget: memory of the host.
    """

    host: deque[Unit]
    device: deque[Batch]
    budget: Budget
    stop: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _results: queue.SimpleQueue[UnitResult | BaseException | None] = field(default_factory=queue.SimpleQueue)

    def take_for_host(self) -> Unit | None:
        """The next unit of the host; None after the last, and after a stop."""
        with self._lock:
            return self.host.popleft() if self.host and not self.stop.is_set() else None

    def take_for_device(self, room: int) -> Batch | None:
        """The next batch that takes no more than `room` bytes; None after the last, and after a stop."""
        with self._lock:
            for batch in () if self.stop.is_set() else self.device:
                if sum(unit.device_bytes for unit in batch) <= room:
                    self.device.remove(batch)
                    return batch
        return None

    def merge(self, session: Session, unit: Unit, device: Device | None = None) -> None:
        """Merge one unit, unless the run was stopped.

        Raises:
            MergeError: the device has too little memory.
        """
        if self.stop.is_set():
            return
        session.inspect_only = self.failed.is_set()
        if device is not None:
            device.activate()  # a batch has threads of its own
        try:
            result = session.merge(unit)
        except RuntimeError as error:
            if device is None or not any(m in str(error).lower() for m in (*MEMORY_MESSAGES, "alloc_failed")):
                raise
            raise _out_of_memory(unit, device, error) from error
        if result.findings.fatal:
            self.failed.set()
        self._results.put(result)

    def guard(self, lane: Callable[[], None]) -> None:
        """Run a worker to its end; its error stops the others."""
        try:
            lane()
        except BaseException as error:  # noqa: BLE001 - the driver raises it again
            self.stop.set()
            self._results.put(error)
        finally:
            self._results.put(None)

    def results_of(self, workers: int) -> Generator[UnitResult, None, None]:
        """Results as they come, until all workers have ended.

        Raises:
            BaseException: the first error of a worker.
        """
        errors: list[BaseException] = []
        while workers:
            found = self._results.get()
            if found is None:
                workers -= 1
            elif isinstance(found, BaseException):
                errors.append(found)
            else:
                yield found
        if errors:
            raise errors[0]

    def finished(self) -> Generator[UnitResult, None, None]:
        """Results that nobody has taken."""
        while not self._results.empty():
            found = self._results.get()
            if isinstance(found, UnitResult):
                yield found


def _check_rooms(units: Sequence[Unit], rooms: Mapping[str, int]) -> None:
    """Refuse units that fit no device, all of them.

    Raises:
        MergeError: there are some.
    """
    largest = max(rooms.values(), default=0)
    if beyond := [unit for unit in units if unit.device_bytes > largest]:
        shown = ", ".join(f"{name} {format_size(room)}" for name, room in rooms.items()) or "there is none"
        raise MergeError(
            f"The devices have too little free memory for {len(beyond)} tensor(s). Free for one tensor: {shown}. "
            "Likely cause: other programs use the device, or several variants are merged in one run. Fix: end these "
            "programs, merge one variant at a time, or give a lower --device-memory, which leaves larger tensors to "
            "the host.",
            [f"tensor '{unit.name}' needs {format_size(unit.device_bytes)}" for unit in beyond],
        )


def _out_of_memory(unit: Unit, device: Device, error: Exception) -> MergeError:
    return MergeError(
        f"{device.name} ran out of memory at tensor '{unit.name}', for which {format_size(unit.device_bytes)} were "
        f"planned; {format_size(device.free_bytes())} of {format_size(device.total_bytes())} are free now. Likely "
        "cause: another program took memory meanwhile, or the estimate is too low. Fix: end that program, or give "
        f"--device-memory below {format_size(unit.device_bytes)}, which leaves this tensor to the host; the same "
        f"command goes on where it stopped. ({' '.join(str(error).split())[:200]})"
    )
