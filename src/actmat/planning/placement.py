"""Placement of items: on a device or on the host, with the memory of each and the reason in words.

    device = base as stored + whole deltas + the method's workspace and statistics    (as on the host, `plan.cost`)
           + chunks that are widened, added up and cast
    host   = base as stored + one statistic as stored + chunks of the result

Blocks of bytes on their way to a device, and scratch memory of its libraries, belong to the device and not to an item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.checkpoints.base import torch_dtype
from actmat.errors import format_size
from actmat.planning.cost import CallShape, region_peak_bytes, statistics_bytes, tensor_peak_bytes
from actmat.planning.model import Form
from actmat.planning.regions import Region

__all__ = ["BLOCK_BYTES", "HOST", "STAGED_BLOCKS", "STAGING_BYTES", "DeviceRoom", "Placed", "place"]

BLOCK_BYTES = 32 << 20
"""Bytes that are moved to a device at a time: enough to reach the bandwidth of a link."""

STAGED_BLOCKS = 10
"""Blocks on their way to a device, each with memory on the host and on the device."""

STAGING_BYTES = STAGED_BLOCKS * BLOCK_BYTES
"""Memory of the way to one device, on the host and on the device."""

MOVED_ENTRIES = 1 << 24
"""Entries that are widened at a time on a device: a block of bytes in bfloat16."""


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The devices that a plan is made for.

    Args:
        device: their names; `cpu`: there are none.
        memory: bytes that one item may take of one of them; None: not known, everything fits.
    """

    device: str = "cpu"
    memory: int | None = None

    @property
    def kind(self) -> str:
        """Kind of the devices."""
        return self.device.partition(":")[0]


HOST = DeviceRoom()


@dataclass(frozen=True, slots=True)
class Placed:
    """Memory of an item on host and device, and the words for its place; no words where there is no choice."""

    host_bytes: int
    device_bytes: int = 0
    words: str = ""


def place(regions: Sequence[Region], call: CallShape, form: Form, room: DeviceRoom) -> Placed:
    """Place one item.

    Args:
        regions: that the method is called on.
        form: see `Item`.
        room: the devices.
    """
    on_host = tensor_peak_bytes(regions, call)
    if room.device == "cpu":
        return Placed(on_host)
    if call.method.acts_on == "elementwise":
        return Placed(on_host, 0, ", on the host: elementwise")
    if form == "factored":
        return Placed(on_host, 0, ", on the host: factors are small")
    if room.kind == "mps" and (call.method.acts_on == "matrix" or call.post):
        return Placed(on_host, 0, ", on the host: mps has no float64, in which spectra are computed")
    need = tensor_peak_bytes(regions, call, _on_device)
    if room.memory is not None and need > room.memory:
        return Placed(
            on_host, 0, f", on the host: it needs {format_size(need)} of a device, which has {format_size(room.memory)}"
        )
    return Placed(tensor_peak_bytes(regions, call, _beside_device), need, f", on {room.kind}")


def _on_device(region: Region, call: CallShape) -> int:
    width = int(torch_dtype(call.compute_dtype).itemsize)
    whole = region_peak_bytes(region, dataclasses.replace(call, chunkable=False))
    return whole - call.library_bytes + 2 * width * min(region.numel, MOVED_ENTRIES)


def _beside_device(region: Region, call: CallShape) -> int:
    width = int(torch_dtype(call.compute_dtype).itemsize)
    matrices = region.layout.matrix_shapes(region.shape) if call.method.acts_on == "matrix" else [region.shape]
    statistics = statistics_bytes(call.method, matrices, 1, width)
    return region.numel * call.base_itemsize + statistics + 2 * width * min(region.numel, MOVED_ENTRIES)
