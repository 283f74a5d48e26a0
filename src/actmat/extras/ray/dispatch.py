"""The driver's side of workers: starts them in a Ray cluster, keeps them busy, replaces those that are lost."""

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
"""Workers that may be lost at one unit, and workers in a row that may be lost before any has started."""
POLL_SECONDS = 10.0
START_SECONDS = 600.0
"""Wait for a first worker: a cluster that grows on demand needs minutes."""
CONTROL = "control"

Send = Callable[[Any, UnitBatch], Any]
"""`send(handle, batch)` calls an actor and returns the reference to its answer."""


@dataclass(eq=False)
class _Hired:
    """One worker as the driver sees it.

    Args:
        handle: of the actor.
        offer: what it was started with.
        pending: reference to the answer it is at; None: idle.
        batch: that the answer is about; None while the session is opened.
        where: node, once it has answered.
    """

    handle: Any
    offer: Offer
    pending: Any = None
    batch: UnitBatch | None = None
    where: str = ""


class Dispatcher:
    """Workers in a cluster, and the batches that they share.

    Args:
        offers: a worker for each.
        pin: id of the only node that may have workers; "" for any.
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
        """Open a session in every worker, also in those that are hired later.

        Args:
            opening: per offer, how it is opened.
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
        """Give results of surveys, a reference, to all sessions of the spec that was opened last."""
        self._surveys = surveys
        for worker in self._workers:
            worker.handle.use.remote(surveys)

    def run(self, batches: Sequence[UnitBatch], send: Send) -> Generator[Answer, None, None]:
        """Answers of all batches, as they come; a batch may be computed twice, but is answered once.

        After an error and when the generator is closed, workers begin no further unit, and those that run are waited
        for; what they finished is yielded before the error is raised.

        Args:
            batches: in the order in which they should begin.
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
        except BaseException:  # Ctrl-C too: results that a later run need not compute again are kept
            yield from self._stop()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End the workers."""
        import ray

        for worker in self._workers:
            with contextlib.suppress(Exception):  # a cluster that is gone has no workers either
                ray.kill(worker.handle)
        self._workers = []

    def _hire(self, offer: Offer) -> _Hired:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(
            num_cpus=1,
            num_gpus=int(offer.device),
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
        """The next batch that a worker can do, out of the queue; accelerators do their own batches first."""
        for wanted in (True, False) if offer.device else (False,):
            for k, batch in enumerate(self._queue):
                if batch.device == wanted and offer.takes(batch):
                    return self._queue.pop(k)
        return None

    def _next(self, send: Send) -> Answer | None:
        """The next answer about a batch; None when something else happened. Its worker is busy again before."""
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
        """The answer that is ready; None if the worker was lost."""
        import ray

        try:
            answer: Answer = ray.get(worker.pending)
        except ray.exceptions.RayTaskError as error:  # no answer: what it was given, or the answer, does not pickle
            raise MergeError(
                f"A worker failed: {_last_line(error)}. This is a bug in actmat; please report it."
            ) from error
        except ray.exceptions.RayError as error:
            self._replace(worker, error)
            return None
        self._alive_at, self._failed_starts = time.monotonic(), 0
        return answer

    def _replace(self, worker: _Hired, error: Exception) -> None:
        """Hire another worker in place of a lost one, whose batch is done again, unit by unit.

        Raises:
            MergeError: too many were lost at one unit, or none starts.
        """
        import ray

        self._workers.remove(worker)
        with contextlib.suppress(Exception):  # most likely it is gone
            ray.kill(worker.handle)
        reason = _last_line(error)
        if worker.batch is None and not worker.where:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                raise MergeError(
                    f"{ATTEMPTS} workers were lost before they had started: {reason}. Likely cause: actmat, of this "
                    "version, is not installed on the nodes of the cluster, or they have too little memory."
                ) from error
        units = () if worker.batch is None else worker.batch.units
        self._lost.update(u.name for u in units)
        for unit in units:
            if self._lost[unit.name] >= ATTEMPTS:
                raise MergeError(
                    f"{ATTEMPTS} workers were lost while they merged '{unit.name}' or its neighbors, the last one on "
                    f"node {worker.where}: {reason}. Likely cause: too little memory; a worker for it reserves "
                    f"{format_size(worker.offer.memory)}. Fix: nodes with more memory, or fewer cores per node ('ray "
                    "start --num-cpus'); the same command goes on where it stopped."
                ) from error
        self._queue[:0] = [UnitBatch((u,)) for u in units]
        if worker.where:
            again = f"; {len(units)} tensor(s) are merged again" if units else ""
            self._notes.append(f"A worker on node {worker.where} was lost ({reason}){again}.")
        hired = self._hire(worker.offer)
        self._open(hired)
        self._workers.append(hired)

    def _check_start(self) -> None:
        """Raise if no worker has answered for too long, and none is at work."""
        if any(w.batch is not None for w in self._workers):
            self._alive_at = time.monotonic()
        if time.monotonic() - self._alive_at < START_SECONDS:
            return
        import ray

        offer = self._workers[0].offer
        free = ray.available_resources()
        raise MergeError(
            f"No worker started in {START_SECONDS:.0f} s. One needs 1 core{' and 1 GPU' * offer.device} and "
            f"{format_size(offer.memory)} of memory; free in the Ray cluster: {free.get('CPU', 0):g} cores, "
            f"{free.get('GPU', 0):g} GPUs, {format_size(free.get('memory', 0))}. Likely cause: other jobs hold the "
            "rest, or nodes have gone; the same command goes on where it stopped."
        )

    def _check_processor(self, answer: Answer) -> None:
        """Refuse workers whose torch uses different vector instructions: last bits may differ between them."""
        self._processors.setdefault(answer.processor, answer.where)
        if len(self._processors) > 1:
            found = ", ".join(f"{node} has {name}" for name, node in self._processors.items())
            raise MergeError(
                f"The nodes have different processors: {found}. The bytes of the output would depend on which node "
                "merged which tensor. Fix: nodes of one kind, or ATEN_CPU_CAPABILITY=avx2 in the environment of all."
            )

    def _stop(self) -> list[Answer]:
        """Let every worker end the unit it is at; answers of those that finished some."""
        import ray

        busy = [w for w in self._workers if w.pending is not None and w.batch is not None]
        answers = []
        for worker in busy:
            with contextlib.suppress(ray.exceptions.RayError):
                worker.handle.stop.options(concurrency_group=CONTROL).remote()
        for worker in busy:
            with contextlib.suppress(ray.exceptions.RayError):  # lost: nothing is known of its units
                answers.append(ray.get(worker.pending))
            worker.pending = worker.batch = None
        self._queue = []
        return [a for a in answers if a.results]


def _last_line(error: Exception) -> str:
    """The most telling line of an error of Ray, which has many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [x for x in lines if "died because" in x or "out of memory" in x.lower() or "Error" in x]
    return (telling or lines or [type(error).__name__])[-1][:300].rstrip(".")
