"""Work of an item: the regions its method is called on, the reading of its deltas, and its place, host or device.

`reading_of` chooses for a single item, when it is planned; `shared_reading` for the outputs of one run that share the
bytes of a tensor, when units are made. The engine and the costs follow what they say.

device = whole deltas + the base where the method takes it + the method's workspace and statistics
         (as on the host, `planning.cost`)
host   = base as stored + one delta that is formed from factors + one statistic as stored + chunks
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.model import Model
from actmat.errors import format_size
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.planning.cost import (
    base_itemsize,
    call_of,
    distinct_regions,
    factored_region_bytes,
    library_bytes,
    module_bytes,
    region_peak_bytes,
    statistics_bytes,
    svd_bytes,
)
from actmat.planning.item import Item, ItemCost, MethodCall, Reading, Target
from actmat.planning.regions import CHUNK, Region, cut
from actmat.recipe import Recipe

HELD_BYTES = 1 << 28
"""Deltas of a region that are held for a method that takes several passes over them: a chunk that is read again is also
converted and subtracted again."""


def regions_of(item: Item) -> tuple[Region, ...]:
    """The regions that the method of an item is called on, in storage order; chunks of a copy; a module as a whole."""
    if item.is_module:
        return (module_region(item.target),)
    if item.call is None:
        return tuple(cut(item.shape, item.layout, "elementwise"))
    acts_on = get_method(item.call.method).acts_on
    if item.call.space != "full":
        acts_on = "matrix"  # of which factors are
    elif item.call.post and acts_on == "elementwise":
        acts_on = "tensor"  # which steps measure
    return tuple(cut(item.shape, item.layout, acts_on))


def module_region(target: Target) -> Region:
    """A module as one region whose logical matrices are its blocks."""
    assert target.module is not None
    blocks, role = target.module.blocks, target.layout.role
    if blocks or role in (Role.CONVOLUTION, Role.STACKED_EXPERTS):
        role = Role.FUSED_LINEAR if blocks else Role.LINEAR
    layout = TensorLayout(role, target.layout.reason, blocks=blocks)
    return Region(0, math.prod(target.shape), target.shape, layout)


def shared_regions(items: Sequence[Item]) -> tuple[Region, ...]:
    """Regions for all outputs of a tensor: the whole tensor if they differ; chunks if it is only copied."""
    wanted = {regions_of(i): None for i in items if i.call is not None}
    if len(wanted) > 1:
        return (Region(0, items[0].numel, items[0].shape, items[0].layout),)
    return next(iter(wanted), regions_of(items[0]))


def works_on_factors(call: MethodCall, target: Target) -> bool:
    """True if a matrix method can work on factors: no expert stores the whole tensor."""
    if call.space != "full":
        return True
    method, sources = get_method(call.method), target.sources
    if target.module is None:
        if method.acts_on != "matrix" or not all(s is not None and (s.kind == "zero" or s.rank) for s in sources):
            return False
        if method.survey is not None and method.survey.applies(call.options):
            return False  # the survey of a full model sees dense deltas, and both must see the same
    return not method.why_dense(call.options, len(sources), call.weights)


def reading_of(item: Item, regions: Sequence[Region], width: int, *, on_device: bool = False) -> Reading:
    """Reading of all regions of a tensor that one method merges from dense deltas.

    Deltas are read chunk by chunk if all are stored: products of factors have the same bits for whole regions only.
    Steps of post-processing read the deltas too, and a chunk is too small for an accelerator.

    Args:
        width: bytes per entry of the compute dtype.
    """
    call, n_experts = call_of(item), len(item.sources)
    method = get_method(call.method)
    if call.post or on_device or not (item.is_chunkable and method.streams(call.options)):
        by_matrix = method.acts_on == "matrix"
        single = all(not by_matrix or len(r.layout.matrix_shapes(r.shape)) == 1 for r in regions)
        return Reading("each" if method.access.one_pass and single and not call.post else "held")
    if method.combine is not None:  # small regions too: memory of their own would come on top of the warm buffers
        return Reading("combine", base_held=False)
    numel = max(region.numel for region in regions)
    if method.access.walks_again and n_experts * numel * width <= HELD_BYTES:
        return Reading("held")
    return Reading("chunks", base_held=numel <= CHUNK or method.uses_base(call.options))


def shared_reading(items: Sequence[Item], *, observed: bool) -> Reading | None:
    """Reading of the outputs of one tensor that share its bytes.

    A single method may receive fewer than all deltas at a time. Several methods, or an observed one, receive all in
    memory; then nothing is combined chunk by chunk. If the base is copied too, it is held.

    Args:
        items: one per output.
        observed: a diagnosis reads the deltas.
    """
    merging = [i for i in items if i.call is not None]
    readings = [i.reading for i in merging if i.reading is not None]
    if not readings:
        return None
    if all(r.strategy == "factors" or r.batched for r in readings):
        return readings[0]
    if len(merging) == 1 and not observed:
        return dataclasses.replace(readings[0], base_held=readings[0].base_held or len(items) > 1)
    return Reading("held")


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


def place(item: Item, recipe: Recipe, room: DeviceRoom) -> tuple[Reading, ItemCost, str]:
    """Reading of an item that a method merges from the base, its memory, and the words for its place.

    `item.reading` says whether it is merged from factors.
    """
    width = torch_dtype(recipe.compute_dtype).itemsize
    regions = distinct_regions(regions_of(item))
    if item.is_factored:
        assert item.reading is not None
        on_host, peak = item.reading, max(factored_region_bytes(region, item, width) for region in regions)
    else:
        on_host = reading_of(item, regions, width)
        peak = max(region_peak_bytes(region, item, on_host, width) for region in regions)
    cost = ItemCost(host_bytes=peak)
    if room.device == "cpu":
        return on_host, cost, ""
    if why := _why_on_host(item, room):
        return on_host, cost, f", on the host: {why}"
    reading = reading_of(item, regions, width, on_device=True)
    need = max(region_peak_bytes(r, item, reading, width) + _eigensolver_bytes(r, item) for r in regions)
    need -= library_bytes(item)
    if room.memory is not None and need > room.memory:
        why = f"it needs {format_size(need)} of a device, which has {format_size(room.memory)}"
        return on_host, cost, f", on the host: {why}"
    beside = max(_host_bytes_beside_device(r, item, width) for r in regions)
    return reading, ItemCost(host_bytes=beside, device_bytes=need), f", on {room.kind}"


class Costs:
    """Costs of items; those of equal shapes and calls are found once."""

    def __init__(self, recipe: Recipe, base: Model | None, room: DeviceRoom) -> None:
        self.room = room
        self._recipe, self._base = recipe, base
        self._width = torch_dtype(recipe.compute_dtype).itemsize
        self._known: dict[Any, tuple[Reading, ItemCost, str]] = {}

    def add(self, item: Item) -> Item:
        """The item with its reading and cost, and the words for its place."""
        if item.action == "tie":
            return item
        read = sum(s.nbytes for s in item.sources if s is not None)
        stored, _ = self._base.tensors.parts(item.name) if self._base is not None else ((), "")
        read += sum(s.nbytes for s in stored)
        written = sum(s.nbytes for s in item.outputs)
        if item.call is None:
            cost = ItemCost(read, written, host_bytes=item.numel * torch_dtype(item.base_dtype).itemsize)
            return dataclasses.replace(item, cost=cost)
        reading, cost, words = self._placed(item, item.call)
        host = cost.host_bytes + (svd_bytes(item, self._width) if item.write.kind == "svd" else 0)
        cost = dataclasses.replace(cost, read_bytes=read, write_bytes=written, host_bytes=host)
        return dataclasses.replace(item, cost=cost, reason=item.reason + words, reading=reading)

    def _placed(self, item: Item, call: MethodCall) -> tuple[Reading, ItemCost, str]:
        # the options live as long as the items, which outlive these costs
        named = (call.method, id(call.options), call.space, len(call.post), item.write.kind, item.write.rank)
        ranks = tuple(s.rank for s in item.sources if s is not None) if item.is_factored else ()
        key = (named, item.shape, item.base_dtype, item.layout, item.is_chunkable, len(item.sources), ranks)
        if not item.has_base:
            assert item.reading is not None, "an adapter is read by its factors"
            peak = module_bytes(item, self._width) if item.is_module else 24 * item.numel
            return item.reading, ItemCost(host_bytes=peak), ""
        if key not in self._known:
            self._known[key] = place(item, self._recipe, self.room)
        return self._known[key]


def _why_on_host(item: Item, room: DeviceRoom) -> str:
    """Reason why no device of this kind merges the item, whatever its size."""
    method = get_method(call_of(item).method)
    if method.acts_on == "elementwise":
        return "elementwise"
    if item.is_factored:
        return "factors are small"
    return ""


def _eigensolver_bytes(region: Region, item: Item) -> int:
    """Memory that cuSOLVER's symmetric eigensolver takes beyond LAPACK's: `2 N^2` entries of float64, in bytes.

    Largest memory allocated by `actmat`: 2.05 `N^2` above the workspace of the host (4096 x 11008, three experts,
    NVIDIA H100, torch 2.11, 2026-11-26).
    """
    call = call_of(item)
    method, n_experts = get_method(call.method), len(item.sources)
    if method.acts_on != "matrix":
        return 0
    shapes = region.layout.matrix_shapes(region.shape)
    return 16 * max(method.cost.side(shape[-2:], n_experts, call.options) for shape in shapes) ** 2


def _host_bytes_beside_device(region: Region, item: Item, width: int) -> int:
    """Memory on the host for a region that a device merges."""
    method = get_method(call_of(item).method)
    matrices = region.layout.matrix_shapes(region.shape) if method.acts_on == "matrix" else [region.shape]
    statistics = statistics_bytes(method, matrices, 1, width)
    return region.numel * (base_itemsize(item) + width) + statistics + 4 * 8 * min(region.numel, CHUNK)
