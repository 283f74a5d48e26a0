"""A simulated run: units on the workers of several nodes, event by event.

Every worker takes the next unit when it is free: it reads and writes the unit's bytes, computes what others may share,
then what they may not. Storage is shared fairly among the workers of a node that read at the time, and evenly among the
nodes. Workers help a long unit of their node before they begin another, and any unit when none is left
(`engine.executors.helpers`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from actmat.engine.units import long_seconds
from actmat.timing.work import Work

__all__ = ["Cluster", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines that do the work.

    Args:
        nodes, workers: machines, and workers on each.
        node_bandwidth: bytes per second that one node reads or writes.
        shared_bandwidth: bytes per second of storage that all nodes share; None: each has its own.
        start_s: seconds until a node begins.
        process_bytes: memory of a node besides its units.
    """

    nodes: int
    workers: int
    node_bandwidth: float
    shared_bandwidth: float | None = None
    start_s: float = 0.0
    process_bytes: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one node while all of them read."""
        shared = math.inf if self.shared_bandwidth is None else self.shared_bandwidth / self.nodes
        return min(self.node_bandwidth, shared)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulated run.

    Args:
        makespan_s: from the start to the end of the last unit.
        compute_bound_s: all work, shared out evenly; `storage_bound_s`: all bytes at the full bandwidth.
        start_s: part of the makespan before the first unit.
        peak_bytes, node_bytes: per node, the peak of memory, and the bytes read and written.
        last: the unit that ended last, `last_began_s` when it began.
        longest: the unit that takes longest by itself.
    """

    makespan_s: float
    compute_bound_s: float
    storage_bound_s: float
    start_s: float
    peak_bytes: tuple[int, ...]
    node_bytes: tuple[int, ...]
    last: Work | None
    last_began_s: float
    longest: Work | None

    @property
    def ideal_s(self) -> float:
        """Time that no schedule is below: the start, and the larger of both bounds."""
        return self.start_s + max(self.compute_bound_s, self.storage_bound_s)

    @property
    def efficiency(self) -> float:
        """The ideal time over the simulated one."""
        return self.ideal_s / self.makespan_s if self.makespan_s else 1.0


def simulate(works: Sequence[Work], cluster: Cluster) -> Simulation:
    """Run units in the given order.

    >>> work = [Work("long", 0, 0, serial_s=3.0), Work("a", 0, 0, serial_s=2.0), Work("b", 0, 0, serial_s=1.0)]
    >>> found = simulate(work, Cluster(nodes=1, workers=2, node_bandwidth=1e9))
    >>> found.makespan_s, found.efficiency
    (3.0, 1.0)
    """
    run = _Run(works, cluster)
    run.go()
    total = sum(w.read_bytes + w.write_bytes for w in works)
    return Simulation(
        makespan_s=run.now,
        compute_bound_s=sum(w.seconds for w in works) / (cluster.nodes * cluster.workers),
        storage_bound_s=total / (cluster.bandwidth * cluster.nodes),
        start_s=cluster.start_s,
        peak_bytes=tuple(n.peak + cluster.process_bytes for n in run.nodes),
        node_bytes=tuple(n.moved for n in run.nodes),
        last=run.last,
        last_began_s=run.last_began,
        longest=max(works, key=lambda w: w.seconds, default=None),
    )


class _Stage:
    """Units in the same stage on one node, each of which advances at the same speed.

    `done` is the amount that a unit has done that was there from the beginning; a unit ends when it has reached the
    amount at which it came plus its own.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Work]] = []
        self._done = 0.0
        self._at = 0.0
        self.speed = 1.0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def panels(self) -> float:
        """The least `Work.panels` in this stage."""
        return min(w.panels for _, _, w in self._ends)

    def advance(self, now: float) -> None:
        """Work until now."""
        self._done += (now - self._at) * self.speed
        self._at = now

    def add(self, number: int, work: Work, amount: float) -> None:
        """A unit with so much to do in this stage."""
        heapq.heappush(self._ends, (self._done + amount, number, work))

    def next_end(self) -> float:
        """Time at which the next unit will have done its part, at this speed."""
        return self._at + max(0.0, self._ends[0][0] - self._done) / self.speed if self._ends else math.inf

    def pop(self) -> tuple[int, Work]:
        """The unit that ends first."""
        end, number, work = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        return number, work


@dataclass
class _Node:
    """One machine: idle workers, and what its units add up to.

    Its stages are storage, shared computing of long units and of others, and computing that is not shared.
    """

    idle: int
    stages: tuple[_Stage, ...] = field(default_factory=lambda: tuple(_Stage() for _ in range(4)))
    used: int = 0
    peak: int = 0
    moved: int = 0
    version: int = 0


class _Run:
    """State of one simulation."""

    def __init__(self, works: Sequence[Work], cluster: Cluster) -> None:
        self.nodes = [_Node(cluster.workers) for _ in range(cluster.nodes)]
        self.now = cluster.start_s
        self.last: Work | None = None
        self.last_began = 0.0
        self._works = works
        self._cluster = cluster
        self._queue = iter(enumerate(works))
        self._left = len(works)
        self._long = long_seconds([w.seconds for w in works], cluster.nodes * cluster.workers)
        self._began: dict[int, float] = {}
        self._events: list[tuple[float, int, int]] = []

    def go(self) -> None:
        """Run to the end."""
        for node in self.nodes:
            for stage in node.stages:
                stage.advance(self.now)
                stage.speed = 1.0
        for _, k in itertools.product(range(self._cluster.workers), range(len(self.nodes))):
            self._take(k)
        for k in range(len(self.nodes)):
            self._renew(k)
        while self._events:
            when, k, version = heapq.heappop(self._events)
            node = self.nodes[k]
            if version != node.version:
                continue
            self.now = when
            for stage in node.stages:
                stage.advance(when)
            self._end_stages(k)
            self._renew(k)

    def _end_stages(self, k: int) -> None:
        """Move every unit of a node that has done its stage to the next, or end it."""
        node, moving = self.nodes[k], True
        while moving:
            moving = False
            for place, stage in enumerate(node.stages):
                while stage.next_end() <= self.now:
                    moving = True
                    number, work = stage.pop()
                    if place == 0:
                        node.stages[1 if work.seconds > self._long else 2].add(number, work, work.shared_s)
                    elif place < 3:
                        node.stages[3].add(number, work, work.serial_s)
                    else:
                        self._end(k, number, work)
        while node.idle and self._left and not self._can_help(node):
            self._take(k)

    def _end(self, k: int, number: int, work: Work) -> None:
        node = self.nodes[k]
        node.idle += 1
        node.used -= work.host_bytes
        self.last, self.last_began = work, self._began.pop(number)

    @staticmethod
    def _can_help(node: _Node) -> bool:
        """True if a long unit has panels for one more worker."""
        long = node.stages[1]
        return len(long) > 0 and node.idle <= len(long) * (long.panels - 1)

    def _take(self, k: int) -> None:
        """An idle worker of a node begins the next unit, if there is one."""
        number, work = next(self._queue, (-1, None))
        if work is None:
            return
        self._left -= 1
        node = self.nodes[k]
        node.idle -= 1
        node.used += work.host_bytes
        node.peak = max(node.peak, node.used)
        node.moved += work.read_bytes + work.write_bytes
        self._began[number] = self.now
        node.stages[0].add(number, work, work.read_bytes + work.write_bytes)

    def _renew(self, k: int) -> None:
        """New speeds of the stages of a node, and its next event."""
        node = self.nodes[k]
        storage, *shared, _ = node.stages
        storage.speed = self._cluster.bandwidth / max(1, len(storage))
        idle = float(node.idle)
        for stage in shared:  # long units first
            stage.speed = 1.0
            if len(stage):
                stage.speed = min(stage.panels, 1 + idle / len(stage))
                idle -= (stage.speed - 1) * len(stage)
        node.version += 1
        when = min(stage.next_end() for stage in node.stages)
        if when < math.inf:
            heapq.heappush(self._events, (max(when, self.now), k, node.version))
