"""Placement of items: on a device or on the host, with the memory of each and the reason in words.

device = whole deltas + the base where the method takes it + the method's workspace and statistics
         (as on the host, `planning.cost`)
host   = base as stored + one delta that is formed from factors + one statistic as stored + chunks
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from actmat.errors import format_size
from actmat.planning.cost import (
    CallShape,
    different,
    factored_tensor_bytes,
    region_peak_bytes,
    statistics_bytes,
    tensor_peak_bytes,
)
from actmat.planning.item import Item, Kernel, Reading
from actmat.planning.reading import regions_of, way_of
from actmat.planning.regions import CHUNK, Region


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The devices that a plan is made for.

    Args:
        device: their names; `cpu`: no devices.
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
    """Place, kernel and reading of an item, its memory, and the words for its place, empty without a choice."""

    host_bytes: int
    device_bytes: int = 0
    words: str = ""
    kernel: Kernel = "copy"
    reading: Reading | None = None


def place(item: Item, call: CallShape, room: DeviceRoom) -> Placed:
    """Place an item of a model that a method merges.

    Args:
        call: of the method.
        room: the devices.
    """
    regions = different(regions_of(item, call.caps))
    kernel, reading = way_of(item, regions, call.caps, call.width, on_device=False)
    if reading is None:
        ranks = sum(max(1, s.rank) for s in item.sources if s is not None)
        on_host = max(factored_tensor_bytes(region, call, ranks) for region in regions)
    else:
        on_host = tensor_peak_bytes(regions, call, reading)
    here = Placed(on_host, kernel=kernel, reading=reading)
    if room.device == "cpu":
        return here
    if why := _why_on_host(call, kernel, room):
        return dataclasses.replace(here, words=f", on the host: {why}")
    kernel, reading = way_of(item, regions, call.caps, call.width, on_device=True)
    assert reading is not None, "factors stay on the host"
    need = max(region_peak_bytes(region, call, reading) + _eigensolver_bytes(region, call) for region in regions)
    need -= call.library_bytes
    if room.memory is not None and need > room.memory:
        why = f"it needs {format_size(need)} of a device, which has {format_size(room.memory)}"
        return dataclasses.replace(here, words=f", on the host: {why}")
    return Placed(max(_beside_device(region, call) for region in regions), need, f", on {room.kind}", kernel, reading)


def _why_on_host(call: CallShape, kernel: Kernel, room: DeviceRoom) -> str:
    """Reason why no device of this kind merges the item, whatever its size."""
    if call.method.acts_on == "elementwise":
        return "elementwise"
    if kernel == "factored":
        return "factors are small"
    if room.kind == "mps" and (call.method.acts_on == "matrix" or call.post):
        return "mps has no float64, in which spectra are computed"
    return ""


def _eigensolver_bytes(region: Region, call: CallShape) -> int:
    """Memory that cuSOLVER's symmetric eigensolver takes beyond LAPACK's: `2 N^2` entries of float64, in bytes.

    Largest memory allocated by `actmat`: 2.05 `N^2` above the workspace of the host (4096 x 11008, three experts,
    NVIDIA H100, torch 2.11, 2026-11-26).
    """
    if call.method.acts_on != "matrix":
        return 0
    shapes = region.layout.matrix_shapes(region.shape)
    found = [o for s in shapes for o in call.method.cost.operations(s[-2:], call.n_experts, call.options, False)]
    largest = max((o.flops for o in found if o.kind == "eigh"), default=0)
    return int(16 * (largest / 9) ** (2 / 3))


def _beside_device(region: Region, call: CallShape) -> int:
    """Memory on the host for a region that a device merges."""
    matrices = region.layout.matrix_shapes(region.shape) if call.method.acts_on == "matrix" else [region.shape]
    statistics = statistics_bytes(call.method, matrices, 1, call.width)
    return region.numel * (call.base_itemsize + call.width) + statistics + 4 * 8 * min(region.numel, CHUNK)
