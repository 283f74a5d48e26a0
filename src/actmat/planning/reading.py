"""Kernel and reading of every item: chosen once, from the recipe and the headers.

`way_of` chooses for a single item, when it is planned; `shared_way` for the outputs of one run that share the bytes of
a tensor, when units are made. The engine and the costs follow what they say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from actmat.methods import get_method
from actmat.methods.contract import MergeMethod
from actmat.planning.item import Item, Kernel, Reading
from actmat.planning.regions import CHUNK, Region, cut, granularity, streams
from actmat.recipe import Postprocess


def regions_of(item: Item, caps: Postprocess) -> tuple[Region, ...]:
    """The regions that the method of an item is called on, in storage order; chunks of a copy."""
    if item.call is None:
        return tuple(cut(item.shape, item.layout, "elementwise"))
    method = get_method(item.call.method)
    acts_on = granularity(method, caps, space=item.call.space, post=bool(item.call.post))
    return tuple(cut(item.shape, item.layout, acts_on))


def shared_regions(items: Sequence[Item], caps: Sequence[Postprocess]) -> tuple[Region, ...]:
    """Regions for all outputs of a tensor: the whole tensor if they differ; chunks if it is only copied."""
    wanted = {regions_of(i, of): None for i, of in zip(items, caps, strict=True) if i.call is not None}
    if len(wanted) > 1:
        return (Region(0, items[0].numel, items[0].shape, items[0].layout),)
    return next(iter(wanted), regions_of(items[0], caps[0]))


def way_of(
    item: Item, regions: Sequence[Region], caps: Postprocess, itemsize: int, *, on_device: bool
) -> tuple[Kernel, Reading | None]:
    """Kernel and reading of an item of a model with a single output.

    Args:
        regions: see `regions_of`.
        itemsize: bytes per entry of the compute dtype.
        on_device: the method computes on a device.
    """
    if item.call is None:
        return "copy", None
    if item.form == "factored":
        return "factored", None
    chunkable = item.is_chunkable and not on_device
    looked_at = caps.norm_cap is not None or bool(item.call.post)
    method, n_experts = get_method(item.call.method), len(item.sources)
    reading = reading_of(
        method, item.call.options, regions, n_experts, itemsize, chunkable=chunkable, observed=looked_at
    )
    return ("combine" if reading.strategy == "combine" else "dense"), reading


def reading_of(
    method: MergeMethod,
    options: Mapping[str, Any],
    regions: Sequence[Region],
    n_experts: int,
    itemsize: int,
    *,
    chunkable: bool = True,
    observed: bool = False,
) -> Reading:
    """Reading of all regions of a tensor that one method merges.

    Args:
        itemsize: bytes per entry of the compute dtype.
        chunkable: deltas can be read chunk by chunk: all are stored, and the method computes on the CPU. Products of
            factors have the same bits for whole regions only, and a chunk is too small for an accelerator.
        observed: the deltas are also read by others: steps of post-processing, caps, or a diagnosis.
    """
    if observed or not chunkable or not method.streams(options):
        by_matrix = method.acts_on == "matrix"
        single = all(not by_matrix or len(r.layout.matrix_shapes(r.shape)) == 1 for r in regions)
        return Reading("each" if method.access.one_pass and single and not observed else "held")
    if method.combine is not None:  # small regions too: memory of their own would come on top of the warm buffers
        return Reading("combine", base_held=False)
    numel = max(region.numel for region in regions)
    streamed = streams(method, options, numel, n_experts, itemsize)
    base_held = not (streamed and numel > CHUNK) or method.uses_base(options)
    return Reading("chunks" if streamed else "held", base_held)


def shared_way(items: Sequence[Item], *, observed: bool) -> tuple[Kernel, Reading | None]:
    """Kernel and reading of the outputs of one tensor that share its bytes.

    A single method may receive fewer than all deltas at a time. Several methods, or an observed one, receive all in
    memory; then nothing is combined chunk by chunk. If the base is copied too, it is held.

    Args:
        items: one per output.
        observed: a diagnosis reads the deltas.
    """
    merging = [i for i in items if i.call is not None]
    if not merging:
        return items[0].kernel, None
    first = merging[0]
    alike = all(i.kernel == first.kernel for i in merging)
    if alike and all(i.reading is None for i in merging):
        return first.kernel, None
    if len(merging) == 1 and first.reading is not None and not observed:
        base_held = first.reading.base_held or len(items) > 1
        return first.kernel, dataclasses.replace(first.reading, base_held=base_held)
    return (first.kernel if alike and first.kernel != "combine" else "dense"), Reading("held")
