"""Connect to a Ray cluster, or start one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from actmat.errors import MergeError, RecipeError
from actmat.extras.ray.batches import Node
from actmat.system import usable_cores

AUTO, LOCAL = "auto", "local"
ANSWER_SECONDS = 10.0
"""Seconds to wait for a cluster to accept a connection; Ray itself would try for many minutes."""
STORE_BYTES = 1 << 29
"""Bytes of the object store of a locally started Ray, which holds one plan."""


def check_address(address: str) -> None:
    """Check an address for `connect` before anything is opened.

    Raises:
        RecipeError: Ray is not installed, or the address has an invalid form.
    """
    if importlib.util.find_spec("ray") is None:
        raise RecipeError(
            "The executor 'ray' needs the package Ray, which is not installed. Fix: pip install 'actmat[ray]', on "
            "every node of the cluster."
        )
    host, _, port = address.rpartition(":")
    if address not in ("", AUTO, LOCAL) and ("://" in address or not host or not port.isdecimal()):
        raise RecipeError(
            f"The executor 'ray' takes the address HOST:PORT of a cluster, 'auto' or 'local'; found '{address}'. The "
            "driver must share the storage of the workers: run the command on a node of the cluster, for example "
            "with 'ray job submit -- actmat merge ... --set executor=ray=auto'."
        )


def connect(address: str) -> bool:
    """Connect this process to Ray unless it is already connected; returns True if a Ray was started.

    Args:
        address: HOST:PORT of a cluster; "auto": the cluster on this machine; "local": a new one; "": RAY_ADDRESS,
        else the cluster on this machine, else a new one.

    Raises:
        MergeError: the address does not respond, or this process is connected to another cluster.
    """
    import ray

    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("", AUTO, LOCAL, here):
            raise MergeError(
                f"This process is connected to the Ray cluster {here}, but the executor names {address}. Fix: "
                "ray.shutdown() first, or the executor 'ray'."
            )
        return False
    with _own_signals():
        return _start(address or os.environ.get("RAY_ADDRESS", ""))


def _start(wanted: str) -> bool:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if wanted != LOCAL:
        try:
            _reach(wanted)
            ray.init(address=wanted or AUTO, **quiet)
            return False
        except (OSError, RuntimeError, ValueError) as error:
            if wanted:
                said = " ".join(str(error).split())[:300]
                raise MergeError(
                    f"There is no Ray cluster at '{wanted}': {said}. Fix: run 'ray start --head' on one node and "
                    "'ray start --address HOST:PORT' on the others, and use the address that the first one printed."
                ) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports to Ray
    cores = usable_cores()
    ray.init(address=LOCAL, num_cpus=cores, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
    return True


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM; Ray's own handler would end the process in the middle of a unit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _reach(address: str) -> None:
    """Raise an `OSError` if nothing accepts connections at HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()


def cluster_nodes() -> dict[str, Node]:
    """Node id -> node, for all live nodes."""
    import ray

    nodes = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            nodes[node["NodeID"]] = Node(int(has.get("CPU", 0)), int(has.get("memory", 0)))
    return nodes


def driver_node() -> str:
    """Id of this process's node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def node_name() -> str:
    """Name of this process's node: the host name, plus part of the id if several nodes share it."""
    import ray

    host, mine = socket.gethostname(), driver_node()
    same = [n for n in ray.nodes() if n["Alive"] and n["NodeManagerHostname"] == host]
    return host if len(same) <= 1 else f"{host}-{mine[:6]}"
