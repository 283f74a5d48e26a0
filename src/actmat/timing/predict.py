"""Predict a run of a plan on the machines that a user names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices.names import parse_devices
from actmat.errors import RecipeError, format_size
from actmat.planning.model import MergePlan
from actmat.timing.rates import Rates
from actmat.timing.schedule import Cluster, Simulation, simulate
from actmat.timing.work import Work, work_of

__all__ = ["Prediction", "parse_nodes", "predict"]

GOOD = 0.9
"""Efficiency below which the cause is named."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted run of one plan.

    Args:
        rates: of each machine.
        cluster: the machines.
        simulation: the result.
        work_s: computing time of all units on one worker; `serial_s`: the part that cannot be shared.
    """

    rates: Rates
    cluster: Cluster
    simulation: Simulation
    work_s: float
    serial_s: float

    @property
    def lines(self) -> list[str]:
        """The prediction in words."""
        c, s = self.cluster, self.simulation
        where = f"{c.nodes} node{'s' * (c.nodes > 1)} with {c.workers} worker{'s' * (c.workers > 1)}"
        found = [
            f"predicted on {where}{' each' * (c.nodes > 1)}, at the rates of {self.rates.host} "
            f"({self.rates.processor}, {self.rates.date}): {duration(s.makespan_s)}",
            f"ideal {duration(s.ideal_s)} (computing {duration(s.compute_bound_s)}, storage "
            f"{duration(s.storage_bound_s)}, start {duration(s.start_s)}): efficiency {s.efficiency:.2f}",
            f"per node: peak memory up to {format_size(max(s.peak_bytes))}, {format_size(max(s.node_bytes))} read and "
            "written at most",
        ]
        return [*found, f"limited by {self.limit}"] if self.limit else found

    @property
    def limit(self) -> str | None:
        """The cause of an efficiency below `GOOD`, in words."""
        s = self.simulation
        if s.efficiency >= GOOD or s.last is None:
            return None
        lost = s.makespan_s - s.ideal_s
        if s.start_s > (1 - GOOD) * s.makespan_s and s.makespan_s - s.start_s < 10:
            return "the start of the process"
        longest = s.longest if s.longest is not None else s.last
        work = longest if longest.seconds > s.compute_bound_s else s.last
        if work.seconds < lost / 2:  # no unit is long enough to keep the others waiting
            return "storage and computing, which take turns in each worker"
        share = f"{duration(work.serial_s)} of which one worker computes alone"
        return f"'{work.name}', which takes {duration(work.seconds)} on one worker, {share}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        c, s = self.cluster, self.simulation
        return {
            "nodes": c.nodes,
            "workers_per_node": c.workers,
            "bandwidth_per_node": c.bandwidth,
            "rates": {"host": self.rates.host, "date": self.rates.date, "versions": dict(self.rates.versions)},
            "seconds": s.makespan_s,
            "ideal_seconds": s.ideal_s,
            "compute_bound_seconds": s.compute_bound_s,
            "storage_bound_seconds": s.storage_bound_s,
            "start_seconds": s.start_s,
            "efficiency": s.efficiency,
            "limited_by": self.limit,
            "work_seconds": self.work_s,
            "serial_seconds": self.serial_s,
            "peak_bytes_per_node": list(s.peak_bytes),
            "moved_bytes_per_node": list(s.node_bytes),
            "last": None if s.last is None else _described(s.last) | {"began": s.last_began_s},
            "longest": None if s.longest is None else _described(s.longest),
        }


def predict(
    plan: MergePlan, rates: Rates, nodes: str = "1", *, bandwidth: str | None = None, network: str | None = None
) -> Prediction:
    """Predict how long a plan takes.

    Args:
        rates: of each machine, see `rates.load_rates`.
        nodes: `NODES` or `NODESxWORKERS`; by default a worker per core, or one per device for a plan that names
            devices; one where it says `cuda`.
        bandwidth: bytes per second of storage that all nodes share, such as `10GB`; default: each has its own disk.
        network: bytes per second between one node and that storage.

    Raises:
        RecipeError: `nodes`, `bandwidth` or `network` cannot be read, or the rates lack the plan's device.
    """
    numbers = parse_devices(plan.device).numbers
    count, workers = parse_nodes(nodes, rates.cores if plan.device == "cpu" else len(numbers or (0,)))
    works = work_of(plan, rates, workers=workers)
    host = rates.rates
    own = _mixed(plan, host.disk_read, host.disk_write)
    if bandwidth is not None or network is not None:  # the node's own disk holds nothing of it
        own = math.inf if network is None else _bytes_per_second("--network", network)
    cluster = Cluster(
        nodes=count,
        workers=workers,
        node_bandwidth=own,
        shared_bandwidth=None if bandwidth is None else _bytes_per_second("--bandwidth", bandwidth),
        start_s=host.start_s,
        process_bytes=plan.process_bytes,
    )
    simulation = simulate(works, cluster)
    return Prediction(rates, cluster, simulation, sum(w.seconds for w in works), sum(w.serial_s for w in works))


def parse_nodes(text: str, workers: int) -> tuple[int, int]:
    """Nodes, and workers on each.

    >>> parse_nodes("4", workers=16), parse_nodes("2x8", workers=16)
    ((4, 16), (2, 8))
    """
    found = re.fullmatch(r"(\d{1,6})(?:x(\d{1,4}))?", text.strip())
    counts = (0, 0) if found is None else (int(found[1]), int(found[2] or workers))
    if min(counts) < 1:
        raise RecipeError(
            f"--simulate expects NODES or NODESxWORKERS, such as 4 or 4x16, each at least 1; got '{text}'"
        )
    return counts


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.04), duration(75), duration(7300), duration(200_000)
    ('0.0 s', '75.0 s', '121.7 min', '55.6 h')
    """
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6 * 3600 else f"{seconds / 3600:.1f} h"


def _mixed(plan: MergePlan, read: float, write: float) -> float:
    """Bytes per second of a disk that reads and writes what the plan does."""
    total = plan.read_bytes + plan.write_bytes
    return total / (plan.read_bytes / read + plan.write_bytes / write) if total else read


def _bytes_per_second(flag: str, text: str) -> float:
    try:
        return float(parse_size(text))
    except RecipeError as error:
        raise RecipeError(f"{flag}: {error.headline}") from None


def _described(work: Work) -> dict[str, Any]:
    return {"name": work.name, "seconds": work.seconds, "serial_seconds": work.serial_s}
