"""Driver side of the workers: starts them in a Ray cluster, assigns batches, replaces lost workers."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.errors import MergeError, format_size
from actmat.extras.ray.batches import Offer, UnitBatch
from actmat.extras.ray.cluster import node_name
from actmat.extras.ray.worker import Answer, Opening, Worker

ATTEMPTS = 4
"""Maximum number of workers lost at one unit, and lost in a row before any has started."""
POLL_SECONDS = 10.0
START_SECONDS = 600.0
"""Seconds to wait for a first worker; an autoscaling cluster needs minutes."""
CONTROL = "control"

Send = Callable[[Any, UnitBatch], Any]
"""`send(handle, batch)` calls an actor and returns a reference to its answer."""


@dataclass(eq=False)
class _Hired:
    """Driver's state of one worker.

    Args:
        handle: handle of the actor.
        offer: resources it was started with.
        pending: reference to its pending answer; None: idle.
        batch: batch of the pending answer; None while the session is being opened.
        where: name of its node, after its first answer.
    """

    handle: Any
    offer: Offer
    pending: Any = None
    batch: UnitBatch | None = None
    where: str = ""


class Dispatcher:
    """Workers of a cluster, and the batches they process.

    Args:
        offers: one worker is started for each.
        pin: id of the only node for workers; "": any node.
    """

    def __init__(self, offers: Sequence[Offer], *, pin: str = "") -> None:
        self._pin = pin
        self._queue: list[UnitBatch] = []
        self._lost: Counter[str] = Counter()
        self._failed_starts = 0
        self._notes: list[str] = []
        self._processors: dict[str, str] = {}
        self._surveys: Any = None
        self._open: Callable[[_Hired], None] = lambda worker: None
        self._alive_at = time.monotonic()
        self._workers = [self._hire(offer) for offer in offers]

    def open(self, opening: Callable[[Offer], Opening], spec: Any) -> None:
        """Open a session in every worker, including workers hired later.

        Args:
            opening: function from offer to `Opening`.
            spec: reference to the `SessionSpec` in the object store; every worker fetches it once.
        """

        def send(worker: _Hired) -> None:
            worker.pending = worker.handle.open.remote(opening(worker.offer), spec)
            if self._surveys is not None:
                worker.handle.use.remote(self._surveys)

        self._surveys = None
        self._open = send
        self._lost.clear()
        for worker in self._workers:
            send(worker)

    def use(self, surveys: Any) -> None:
        """Send survey results, given by reference, to all sessions of the last opened spec."""
        self._surveys = surveys
        for worker in self._workers:
            worker.handle.use.remote(surveys)

    def run(self, batches: Sequence[UnitBatch], send: Send) -> Generator[Answer, None, None]:
        """Yield the answers of all batches as they arrive; a batch may be computed twice, but is answered once.

        After an error, or when the generator is closed, workers start no further unit. Running units are awaited, and
        their results are yielded before the error is raised.

        Args:
            batches: batches in starting order.
            send: see `Send`.
        """
        self._queue = list(batches)
        try:
            while self._queue or any(w.batch is not None for w in self._workers):
                self._assign(send)
                answer = self._next(send)
                if answer is None:
                    continue
                error = answer.error
                if answer.results or error is None:
                    yield answer
                if error is not None:
                    raise error
        except GeneratorExit:
            self._stop()
            raise
        except BaseException:  # also Ctrl-C: keep finished results for a later run
            yield from self._stop()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """New notes for the user since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End the workers."""
        import ray

        for worker in self._workers:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(worker.handle)
        self._workers = []

    def _hire(self, offer: Offer) -> _Hired:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(
            num_cpus=1,
            memory=offer.memory,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._pin, soft=False) if self._pin else "SPREAD",
            concurrency_groups={CONTROL: 1},
        )(Worker)
        return _Hired(actor.remote(node_name), offer)

    def _assign(self, send: Send) -> None:
        """Give every idle worker a batch."""
        for worker in self._workers:
            if worker.pending is not None:
                continue
            worker.batch = self._take(worker.offer)
            if worker.batch is not None:
                worker.pending = send(worker.handle, worker.batch)

    def _take(self, offer: Offer) -> UnitBatch | None:
        """Take the next batch that a worker can merge."""
        position = next((k for k, batch in enumerate(self._queue) if offer.takes(batch)), None)
        return None if position is None else self._queue.pop(position)

    def _next(self, send: Send) -> Answer | None:
        """The next answer to a batch, after its worker got a new batch; None if something else happened."""
        import ray

        busy = {w.pending: w for w in self._workers if w.pending is not None}
        assert busy or not self._workers, "batches that no worker takes"
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=POLL_SECONDS) if busy else ([], [])
        if not ready:
            self._check_start()
            return None
        worker = busy[ready[0]]
        answer = self._fetch(worker)
        if answer is None:
            return None
        worker.where = answer.where
        opened, worker.batch, worker.pending = worker.batch is None, None, None
        if not opened:
            if answer.error is None:
                self._assign(send)
            return answer
        if answer.error is not None:
            raise answer.error
        self._check_processor(answer)
        return None

    def _fetch(self, worker: _Hired) -> Answer | None:
        """The worker's ready answer; None if the worker was lost."""
        import ray

        try:
            answer: Answer = ray.get(worker.pending)
        except ray.exceptions.RayTaskError as error:  # arguments or answer could not be pickled
            raise MergeError(
                f"A worker failed: {_last_line(error)}. This is a bug in actmat; please report it."
            ) from error
        except ray.exceptions.RayError as error:
            self._replace(worker, error)
            return None
        self._alive_at, self._failed_starts = time.monotonic(), 0
        return answer

    def _replace(self, worker: _Hired, error: Exception) -> None:
        """Replace a lost worker; its batch is merged again in the end, unit by unit.

        Raises:
            MergeError: too many workers were lost at one unit, or none starts.
        """
        import ray

        self._workers.remove(worker)
        with contextlib.suppress(Exception):  # it is probably gone
            ray.kill(worker.handle)
        reason = _last_line(error)
        if worker.batch is None and not worker.where:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                raise MergeError(
                    f"{ATTEMPTS} workers were lost before they had started: {reason}. Likely cause: this version of "
                    "actmat is not installed on the nodes of the cluster, or they have too little memory."
                ) from error
        units = () if worker.batch is None else worker.batch.units
        self._lost.update(u.name for u in units)
        for unit in units:
            if self._lost[unit.name] >= ATTEMPTS:
                raise MergeError(
                    f"{ATTEMPTS} workers were lost while merging '{unit.name}' or its neighbors, the last one on "
                    f"node {worker.where}: {reason}. Likely cause: too little memory; a worker for it reserves "
                    f"{format_size(worker.offer.memory)}. Fix: nodes with more memory, or fewer cores per node ('ray "
                    "start --num-cpus'); the same command goes on where it stopped."
                ) from error
        self._queue += [UnitBatch((u,)) for u in units]  # last: what kills workers must not keep them from others
        if worker.where:
            again = f"; {len(units)} tensor(s) are merged again" if units else ""
            self._notes.append(f"A worker on node {worker.where} was lost ({reason}){again}.")
        hired = self._hire(worker.offer)
        self._open(hired)
        self._workers.append(hired)

    def _check_start(self) -> None:
        """Raise if no worker has answered for too long and none is working."""
        if any(w.batch is not None for w in self._workers):
            self._alive_at = time.monotonic()
        if time.monotonic() - self._alive_at < START_SECONDS:
            return
        import ray

        offer = self._workers[0].offer
        free = ray.available_resources()
        raise MergeError(
            f"No worker started in {START_SECONDS:.0f} s. One needs 1 core and {format_size(offer.memory)} of memory; "
            f"free in the Ray cluster: {free.get('CPU', 0):g} cores, {format_size(free.get('memory', 0))}. Likely "
            "cause: other jobs use the rest, or nodes are down; the same command goes on where it stopped."
        )

    def _check_processor(self, answer: Answer) -> None:
        """Raise if the workers' torch uses different vector instructions, so that last bits may differ."""
        self._processors.setdefault(answer.processor, answer.where)
        if len(self._processors) > 1:
            listed = ", ".join(f"{node} has {name}" for name, node in self._processors.items())
            raise MergeError(
                f"The nodes have different processors: {listed}. The bytes of the output would depend on which node "
                "merged which tensor. Fix: nodes of one kind, or ATEN_CPU_CAPABILITY=avx2 in the environment of all."
            )

    def _stop(self) -> list[Answer]:
        """Let every worker finish its current unit; returns the answers with results."""
        import ray

        busy = [w for w in self._workers if w.pending is not None and w.batch is not None]
        answers = []
        for worker in busy:
            with contextlib.suppress(ray.exceptions.RayError):
                worker.handle.stop.options(concurrency_group=CONTROL).remote()
        for worker in busy:
            with contextlib.suppress(ray.exceptions.RayError):  # lost: its units are unknown
                answers.append(ray.get(worker.pending))
            worker.pending = worker.batch = None
        self._queue = []
        return [a for a in answers if a.results]


def _last_line(error: Exception) -> str:
    """The most informative line of a multi-line Ray error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [x for x in lines if "died because" in x or "out of memory" in x.lower() or "Error" in x]
    return (telling or lines or [type(error).__name__])[-1][:300].rstrip(".")
