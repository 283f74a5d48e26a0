"""A device: memory with a bound, copies to and from it, and the order of its work.

The engine needs no more of a device than this, so that the same code runs on a GPU and on a simulated device, which
computes on the CPU and refuses memory above its bound (`SimulatedDevice`).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices.ledger import Ledger
from actmat.engine.devices.names import DeviceNames, parse_devices
from actmat.errors import RecipeError, format_size
from actmat.planning.placement import BLOCK_BYTES, HOST, STAGED_BLOCKS, STAGING_BYTES, DeviceRoom
from actmat.planning.regions import CHUNK

SLOTS = STAGED_BLOCKS - 2
"""Blocks that are read ahead: enough for the next matrix while one is merged. Two more are for what was not."""

_CUDA: Any = torch.cuda
"""Its streams and events have no annotations."""

UNBOUNDED = 1 << 40
"""Bytes of a simulated device without a limit."""


class Mark(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait on the host until the device has come to it."""


class Device(abc.ABC):
    """One device; the threads that use it take turns.

    Attributes:
        name: such as `cuda:0`.
        torch_device: the same for torch.
        block_bytes: bytes that are moved at a time.
        out_entries: entries of a result that are moved at a time.
        limit: bytes that its user allows, or None.
        headroom: share of its memory that plans leave to its libraries (context, handles, workspaces) and to fragments.
    """

    name: str
    torch_device: torch.device
    block_bytes: int = BLOCK_BYTES
    out_entries: int = 1 << 22
    limit: int | None = None
    headroom: float = 0.1

    @abc.abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    @property
    def staging_bytes(self) -> int:
        """Memory of the blocks on their way to the device, which it holds besides what is merged (`staging`)."""
        return STAGED_BLOCKS * self.block_bytes

    def usable_bytes(self, memory: int) -> int:
        """Bytes for one item where so much memory can be had, within the limit that the user sets."""
        return max(0, (memory if self.limit is None else min(memory, self.limit)) - self.staging_bytes)

    def planned_bytes(self) -> int:
        """Bytes for one item that plans count on: of the memory that it has, whoever uses some of it now."""
        return self.usable_bytes(int((1 - self.headroom) * self.total_bytes()))

    def activate(self) -> None:  # noqa: B027 - most devices need nothing
        """Make it the current device of this thread."""

    def computing(self) -> AbstractContextManager[None]:
        """For everything that allocates on the device."""
        return contextlib.nullcontext()

    def host_buffer(self, nbytes: int) -> Tensor:
        """Bytes on the host from which the device copies fast (pinned, where there is such a thing)."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the device, contents arbitrary."""
        with self.computing():
            return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def send(self, host: Tensor, there: Tensor, after: Mark | None) -> Mark:
        """Begin to copy up, not before `after`; the mark is the end of the copy."""
        there.copy_(host)
        return _DONE

    def fetch(self, there: Tensor, host: Tensor) -> Mark:
        """Begin to copy down what has been computed so far; the mark is the end of the copy."""
        host.copy_(there)
        return _DONE

    def wait(self, mark: Mark) -> None:  # noqa: B027 - copies of most devices are done when they return
        """Whatever is computed from now on comes after the mark."""

    def mark(self) -> Mark:
        """The end of what has been computed so far."""
        return _DONE


class _Done:
    def synchronize(self) -> None:
        """Nothing is left to do."""


_DONE: Mark = _Done()


class SimulatedDevice(Device):
    """Computes on the CPU, in the same way and with the same bytes, within a memory of its own (`Ledger`).

    Args:
        name: such as `cpu:0`.
        memory: bytes that it has.
    """

    block_bytes = 1 << 20
    headroom = 0.0
    out_entries = CHUNK  # a product is added to the base in one rounding or in two, by its place in a chunk

    def __init__(self, name: str, memory: int = UNBOUNDED) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.ledger = Ledger(name, memory)

    def total_bytes(self) -> int:
        """See `Device`."""
        return self.ledger.limit

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.ledger.limit - self.ledger.used

    def computing(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return self.ledger.counting()


class CudaDevice(Device):
    """One CUDA device: pinned buffers, a stream for copies in each direction, events between them and the work."""

    def __init__(self, number: int, limit: int | None = None) -> None:
        self.name = f"cuda:{number}"
        self.torch_device = torch.device("cuda", number)
        self.limit = limit
        self._up = _CUDA.Stream(self.torch_device)
        self._down = _CUDA.Stream(self.torch_device)

    def total_bytes(self) -> int:
        """See `Device`."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        """The driver's number, and memory that torch holds without using it."""
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + unused

    def activate(self) -> None:
        """See `Device`."""
        torch.cuda.set_device(self.torch_device)

    def host_buffer(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor, there: Tensor, after: Mark | None) -> Mark:
        """See `Device`."""
        with torch.cuda.stream(self._up):
            if isinstance(after, torch.cuda.Event):
                self._up.wait_event(after)
            there.copy_(host, non_blocking=True)
            return self._recorded(self._up)

    def fetch(self, there: Tensor, host: Tensor) -> Mark:
        """See `Device`."""
        self._down.wait_event(self._recorded(torch.cuda.current_stream(self.torch_device)))
        with torch.cuda.stream(self._down):
            host.copy_(there, non_blocking=True)
            return self._recorded(self._down)

    def wait(self, mark: Mark) -> None:
        """See `Device`."""
        if isinstance(mark, torch.cuda.Event):
            torch.cuda.current_stream(self.torch_device).wait_event(mark)

    def mark(self) -> Mark:
        """See `Device`."""
        return self._recorded(torch.cuda.current_stream(self.torch_device))

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = _CUDA.Event()
        event.record(stream)
        return event


class MetalDevice(Device):
    """The GPU of an Apple processor, which shares the memory of the host; its copies are done when they return."""

    def __init__(self, limit: int | None = None) -> None:
        self.name = "mps"
        self.torch_device = torch.device("mps")
        self.limit = limit

    def total_bytes(self) -> int:
        """See `Device`."""
        return int(torch.mps.recommended_max_memory())

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.total_bytes() - int(torch.mps.driver_allocated_memory())


def open_devices(names: str, memory: int | None = None) -> list[Device]:
    """The devices of a text such as `cuda:0,2`; none for the host.

    Args:
        memory: bytes that each may use; simulated devices have this much.

    Raises:
        RecipeError: it names no device.
    """
    found = parse_devices(names)
    if found.kind == "cuda":
        numbers: Sequence[int] = range(torch.cuda.device_count()) if found.numbers is None else found.numbers
        return [CudaDevice(number, memory) for number in numbers]
    if found.kind == "mps":
        return [MetalDevice(memory)]
    return [SimulatedDevice(f"cpu:{n}", UNBOUNDED if memory is None else memory) for n in found.numbers or ()]


def _are_here(names: DeviceNames) -> bool:
    """True if torch sees all of these devices."""
    if names.kind == "cuda":
        return torch.cuda.is_available() and max(names.numbers or (0,)) < torch.cuda.device_count()
    return names.kind == "cpu" or torch.backends.mps.is_available()


def device_room(names: str, memory: str | int | None = None) -> DeviceRoom:
    """The room for items that plans count on; the devices need not be on this machine.

    Args:
        names: see `parse_devices`.
        memory: what each may use; default: the largest has what it has, if it is here.

    Raises:
        RecipeError: no devices, or a limit that leaves nothing for an item.
    """
    found = parse_devices(names)
    limit = None if memory is None else parse_size(memory)
    if found.is_host:
        if limit is not None:
            raise RecipeError(f"--device-memory {memory} limits devices, and there are none; give --device as well")
        return HOST
    present = open_devices(names, limit) if _are_here(found) else []
    usable = max((d.planned_bytes() for d in present), default=None)
    if usable is None and limit is not None:
        usable = limit - STAGED_BLOCKS * BLOCK_BYTES
    if usable is not None and usable <= 0:
        raise RecipeError(
            f"{'the devices have' if memory is None else f'--device-memory {memory} is'} too little memory: bytes on "
            f"their way to a device alone take {format_size(present[0].staging_bytes if present else STAGING_BYTES)}"
        )
    return DeviceRoom(names, usable)
