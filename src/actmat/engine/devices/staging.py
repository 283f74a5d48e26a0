"""Bytes on their way from files to one device: read ahead by a thread, copied up while the device computes.

A `Transfer` is one run of stored bytes, such as a tensor of one expert. It arrives in blocks. A block is read into a
buffer on the host (pinned for a GPU), where it is hashed, and copied to a buffer on the device; both belong to a slot,
and slots are used again. The thread begins transfers in the order in which they are announced and stops when all slots
wait to be used. A transfer that is wanted before the thread has begun it is read by the thread that wants it, with
slots of its own: no order of requests can block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actmat.checkpoints.raw import raw_bytes
from actmat.engine.devices.device import SLOTS, Device, Mark


class Slot:
    """A buffer on the host and one on the device.

    Attributes:
        sent: end of the copy from the one to the other.
        used: end of the work that reads the one on the device.
    """

    def __init__(self, device: Device) -> None:
        self._host = device.host_buffer(device.block_bytes)
        self._there = device.empty(device.block_bytes, torch.uint8)
        self.sent: Mark | None = None
        self.used: Mark | None = None

    def fill(self, device: Device, transfer: Transfer, start: int) -> None:
        """Read a block and begin to copy it up."""
        stop = min(start + device.block_bytes // transfer.dtype.itemsize, transfer.numel)
        nbytes = (stop - start) * transfer.dtype.itemsize
        if self.sent is not None:
            self.sent.synchronize()
        self.host = self._host[:nbytes].view(transfer.dtype)
        self.there = self._there[:nbytes].view(transfer.dtype)
        transfer.read(start, raw_bytes(self.host))
        self.sent = device.send(self.host, self.there, self.used)


@dataclass(eq=False)
class Transfer:
    """Entries of one tensor of one input, from storage to the device.

    Args:
        numel, dtype: of the entries.
        read: `read(start, out)` fills `out` with the bytes from entry `start` on; called in order.
    """

    numel: int
    dtype: torch.dtype
    read: Callable[[int, memoryview], None]
    ready: deque[Slot] = field(default_factory=deque)
    begun: bool = False
    dropped: bool = False
    reading: bool = False
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block that has arrived: entries from `start` on, on the host and on the device, until the next is taken."""

    start: int
    host: Tensor
    there: Tensor


class Staging:
    """The way of bytes to one device.

    Args:
        device: where they go.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._own = [Slot(device), Slot(device)]  # of transfers that nobody has read ahead
        self._change = threading.Condition()
        self._free: list[Slot] = []
        self._waiting: deque[Transfer] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Staging:
        """Start the thread that reads ahead."""
        self._free = [Slot(self.device) for _ in range(SLOTS)]
        self._thread = threading.Thread(target=self._read_ahead, name=f"actmat-{self.device.name}-reader", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End it; what it has read is lost."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._free, self._own = [], []

    def announce(self, transfers: Iterable[Transfer]) -> None:
        """Say what will be wanted next, in order; without a thread that reads ahead it is read when it is wanted."""
        if self._thread is not None:
            with self._change:
                self._waiting.extend(transfers)
                self._change.notify_all()

    def blocks(self, transfer: Transfer) -> Iterator[Arrived]:
        """The blocks of a transfer, in order; whatever the caller does with one must have begun when it takes the next.

        Raises:
            MergeError: from reading.
        """
        with self._change:
            begun, transfer.begun = transfer.begun, True
            if not begun and transfer in self._waiting:
                self._waiting.remove(transfer)
        start = 0
        while start < transfer.numel:
            slot = self._next(transfer) if begun else self._own.pop(0)
            if not begun:
                self._own.append(slot)
                slot.fill(self.device, transfer, start)
            assert slot.sent is not None, "a slot that is filled was sent"
            try:
                self.device.wait(slot.sent)
                yield Arrived(start, slot.host, slot.there)
            finally:  # also after an error of the caller: a slot that is lost would be missed by all that follow
                start += slot.there.numel()
                slot.used = self.device.mark()
                if begun:
                    self._give_back([slot])

    def drop(self, transfers: Iterable[Transfer]) -> None:
        """Forget transfers; when this returns, none of them is being read."""
        with self._change:
            dropped = list(transfers)
            for transfer in dropped:
                transfer.dropped = transfer.begun = True
                if transfer in self._waiting:
                    self._waiting.remove(transfer)
            self._change.notify_all()
            self._change.wait_for(lambda: not any(t.reading for t in dropped))
            for transfer in dropped:
                self._free += transfer.ready
                transfer.ready.clear()
            self._change.notify_all()

    def _next(self, transfer: Transfer) -> Slot:
        """The next block that the other thread has read."""
        with self._change:
            self._change.wait_for(lambda: transfer.ready or transfer.error is not None or self._closed)
            if transfer.ready:
                return transfer.ready.popleft()
            assert transfer.error is not None, "nobody takes blocks after the end"
            raise transfer.error

    def _give_back(self, slots: Iterable[Slot]) -> None:
        with self._change:
            self._free += slots
            self._change.notify_all()

    def _read_ahead(self) -> None:
        self.device.activate()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or (self._waiting and self._free))
                if self._closed:
                    return
                slot, transfer = self._free.pop(), self._waiting.popleft()
                transfer.begun = transfer.reading = True
            try:
                self._read(transfer, slot)
            except BaseException as error:  # noqa: BLE001 - the thread that waits for the bytes raises it
                transfer.error = error
            with self._change:
                transfer.reading = False
                self._change.notify_all()

    def _read(self, transfer: Transfer, slot: Slot) -> None:
        start = 0
        while True:
            try:
                slot.fill(self.device, transfer, start)
            except BaseException:  # Ctrl-C too: a slot that is not given back would block the next run
                self._give_back([slot])
                raise
            start += slot.there.numel()
            with self._change:
                transfer.ready.append(slot)
                self._change.notify_all()
                if start >= transfer.numel:
                    return
                self._change.wait_for(lambda: self._closed or transfer.dropped or self._free)
                if self._closed or transfer.dropped:
                    return
                slot = self._free.pop()
