"""`RayExecutor`: runs a merge in a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources
from actmat.engine.session import SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey, run_surveys
from actmat.engine.units import Member, Unit, plan_units
from actmat.extras.ray import cluster
from actmat.extras.ray.batches import Node, Offer, UnitBatch, make_batches, plan_offers
from actmat.extras.ray.dispatch import Dispatcher
from actmat.extras.ray.shared import prepared_storage
from actmat.extras.ray.worker import Answer, Opening
from actmat.planning.cost import nominal_seconds
from actmat.planning.model import Item


class RayExecutor:
    """One worker per core of a Ray cluster, each with its own session; see docs/cluster.md.

    Args:
        inputs, writers: not used; workers open their own.
        resources: maximum number of workers and memory of each node, if the user set them.
        address: see `cluster.connect`.
        workers: existing workers, which are not ended; default: as many as fit, ended after `run`.
    """

    elsewhere = True

    def __init__(
        self,
        inputs: Inputs,
        writers: Sequence[Writer | None],
        resources: Resources,
        *,
        address: str = "",
        workers: Dispatcher | None = None,
    ) -> None:
        del inputs, writers
        self._resources = resources
        self._address = address
        self._given = workers
        self._workers = workers
        self._stack = contextlib.ExitStack()
        self._shipped: SessionSpec | None = None

    @classmethod
    def at(cls, address: str) -> ExecutorFactory:
        """Factory of executors for the cluster at an address, see `cluster.connect`; starts nothing.

        Raises:
            RecipeError: Ray is not installed, or the address is of another kind.
        """
        cluster.check_address(address)
        return partial(cls, address=address)

    @staticmethod
    def device_problem(device: str) -> str | None:
        """See `Executor`."""
        if device == "cpu":
            return None
        return f"merges on CPUs only; found the device '{device}'. Fix: remove --device, or use --set executor=threads."

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """See `Executor`."""
        with self._ending_on_error():
            return run_surveys(spec.plans, partial(self._observe, spec))

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """See `Executor`."""
        import ray

        with self._stack, self._ending():
            if not units:
                return
            workers = self._opened(spec, units)
            if spec.surveys:
                workers.use(ray.put(spec.surveys))
            failed = False

            def send(handle: Any, batch: UnitBatch) -> Any:
                return handle.merge.remote(batch.units, inspect_only=failed)

            with contextlib.closing(workers.run(self._batches(units, workers), send)) as answers:
                for answer in answers:
                    failed |= any(result.findings.fatal for result in answer.results)
                    yield from _released(answer, workers)

    def _observe(self, spec: SessionSpec, fork: Callable[[], Any], items: Sequence[Item]) -> Iterator[Any]:
        """Run one pass of a survey; every batch has its own state, so that a lost worker loses only that."""
        import ray

        places = {id(item): (p, n) for p, plan in enumerate(spec.plans) for n, item in enumerate(plan.items)}
        units = [_observed(item, places[id(item)]) for item in items]
        whole = plan_units(spec.plans, [()] * len(spec.plans), observed=spec.observers is not None)
        workers = self._opened(spec, whole)
        state = ray.put(fork())

        def send(handle: Any, batch: UnitBatch) -> Any:
            return handle.observe.remote(batch.units, state)

        with contextlib.closing(workers.run(self._batches(units, workers), send)) as answers:
            for answer in answers:
                yield from answer.results

    def _batches(self, units: Sequence[Unit], workers: Dispatcher) -> list[UnitBatch]:
        return make_batches(units, len(workers))

    def _opened(self, spec: SessionSpec, units: Sequence[Unit]) -> Dispatcher:
        """Workers with an open session for the spec, possibly without its survey results."""
        import ray

        plain = dataclasses.replace(spec, surveys={})
        if self._workers is not None and plain == self._shipped:
            return self._workers
        if cluster.connect(self._address):
            self._stack.callback(ray.shutdown)
        nodes, here = cluster.cluster_nodes(), cluster.driver_node()
        alone = set(nodes) == {here}
        if self._workers is None:
            self._workers = Dispatcher(self._offers(spec, units, nodes.values()), pin=here if alone else "")
        tokens = self._stack.enter_context(prepared_storage(spec))
        key = secrets.token_hex(8)

        def opening(offer: Offer) -> Opening:
            room = offer.memory - offer.process
            return Opening(key, tokens, os.getcwd(), synchronous=not alone, room=room)

        self._workers.open(opening, ray.put(plain))
        self._shipped = plain
        return self._workers

    def _offers(self, spec: SessionSpec, units: Sequence[Unit], nodes: Iterable[Node]) -> list[Offer]:
        resources = self._resources
        if resources.memory_given:
            nodes = [dataclasses.replace(n, memory=min(n.memory, resources.memory)) for n in nodes]
        process = max(plan.process_bytes for plan in spec.plans)
        most = resources.workers if resources.workers_given else len(units)
        return plan_offers(list(nodes), units, process, min(most, len(units)))

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End started workers in any case."""
        try:
            yield
        finally:
            if self._workers is not None and self._given is None:
                self._workers.close()
                self._workers = None
            self._shipped = None

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End started workers if the block fails; otherwise keep them for the next call."""
        try:
            yield
        except BaseException:  # Ctrl-C too
            with self._stack, self._ending():
                raise


def _observed(item: Item, member: Member) -> Unit:
    """An item as a unit of a survey."""
    return Unit((member,), item.name, item.cost.read_bytes, nominal_seconds(item), item.cost.host_bytes)


def _released(answer: Answer, workers: Dispatcher) -> Iterator[UnitResult]:
    """Yield the results of an answer without keeping them; the first carries notes for the user."""
    results = deque(answer.results)
    answer.results.clear()
    if results and (notes := workers.notes):
        results[0] = dataclasses.replace(results[0], notes=notes)
    while results:
        yield results.popleft()
