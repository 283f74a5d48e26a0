"""Limits of a run on this machine: workers, memory, device. Nothing here changes the result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices import open_devices
from actmat.engine.memory import available_memory
from actmat.engine.observer import observing_bytes
from actmat.errors import RecipeError, format_size
from actmat.planning.cost import BASELINE_BYTES
from actmat.planning.model import MergePlan
from actmat.planning.work import DeviceRoom
from actmat.system import usable_cores

MOST_WORKERS = 1024
"""Most threads that a user's number starts; each takes memory before it has work."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of one run. Nothing here changes the output's bytes, except the kind of device.

    Args:
        workers: tensors at work at the same time.
        memory: budget of all workers together, in bytes, see `plan.cost`.
        device: names of the devices that merge items, see `engine.devices`.
        device_memory: bytes of each device for all of its items together.
        workers_given, memory_given: whether the user set the limit; else it is what this machine has, which tells
            nothing about other machines.
    """

    workers: int
    memory: int
    device: str = "cpu"
    device_memory: float = math.inf
    workers_given: bool = True
    memory_given: bool = True


def share_resources(
    plans: Sequence[MergePlan],
    room: DeviceRoom,
    max_memory: str | int | None,
    threads: int | None,
    observed: bool = False,
    buffer_bytes: int = 0,
) -> Resources:
    """Workers and memory for these plans.

    Args:
        plans: of all outputs.
        room: devices that merge items; as many threads as the host has workers feed them.
        max_memory: limit for the whole process, such as "4GB"; default: nine tenths of the free memory.
        threads: workers; default: one per core that this process may use.
        observed: whether the run is measured, which takes memory too.
        buffer_bytes: what each worker takes to read inputs ahead.

    Raises:
        RecipeError: the largest tensor alone does not fit.
    """
    workers = usable_cores() if threads is None else min(threads, MOST_WORKERS)
    if workers < 1:
        raise RecipeError(f"--threads must be at least 1; got {threads}.")
    width = torch_dtype(plans[0].recipe.compute_dtype).itemsize
    peaks = [
        (i.cost.host_bytes + (observing_bytes(i, width) if observed else 0), i.name) for p in plans for i in p.items
    ]
    largest, worst = max(peaks, key=lambda peak: peak[0], default=(0, ""))
    device, on_device = room.device, math.inf if room.memory is None else room.memory
    devices = len(open_devices(device))
    buffers = (workers + (max(workers, devices) if devices else 0)) * buffer_bytes
    process = BASELINE_BYTES + buffers + sum(p.process_bytes - BASELINE_BYTES for p in plans)
    if max_memory is None:
        memory = max(int(0.9 * available_memory()) - process, largest)
        return Resources(workers, memory, device, on_device, workers_given=threads is not None, memory_given=False)
    limit = parse_size(max_memory)
    if limit < process + largest:
        raise RecipeError(
            f"--max-memory {max_memory} is too little: tensor '{worst}' alone needs {format_size(largest)}, "
            f"the process itself {format_size(process)}: allow at least {format_size(process + largest)}."
        )
    return Resources(workers, limit - process, device, on_device, workers_given=threads is not None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread inside the block, and restore the former number afterwards.

    For parallel workers, and for tensors so small that more threads are slower. PyTorch has no narrower switch than
    the process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
