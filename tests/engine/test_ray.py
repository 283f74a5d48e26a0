"""The executor 'ray' on a real cluster of three nodes of one core each, which all tests of this file share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from actmat.engine.executors.base import Executor
from actmat.engine.executors.conformance import ExecutorConformance
from actmat.engine.executors.ray import RayExecutor
from actmat.engine.executors.ray.batches import Offer
from actmat.engine.executors.ray.dispatch import Dispatcher
from actmat.engine.inputs import Inputs
from actmat.engine.observer import SinkSource
from actmat.engine.resources import Resources

ray = pytest.importorskip("ray")
STORE_BYTES = 80 << 20
NODES = 3
MEMORY = 1 << 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "memory": 4 << 30}
    running = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            running.add_node(**node)
        ray.init(address=running.address, log_to_driver=False)
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


@pytest.fixture(scope="module")
def workers(cluster: object) -> Iterator[Dispatcher]:
    """One worker per node, which tests share, because starting one takes seconds."""
    shared = Dispatcher([Offer(MEMORY, MEMORY // 2)] * NODES)
    yield shared
    shared.close()


class TestRay(ExecutorConformance):
    workers = NODES

    @pytest.fixture(autouse=True)
    def share(self, workers: Dispatcher) -> None:
        self.dispatcher = workers

    def make(self, inputs: Inputs, writers: Sequence[SinkSource], resources: Resources) -> Executor:
        return RayExecutor(inputs, writers, resources, workers=self.dispatcher)
