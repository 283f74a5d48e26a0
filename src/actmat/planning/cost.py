"""Cost of one item, from shapes and reading: memory of one worker, and rough time on a typical core.

    peak = raw base + raw chunk of each expert, of one where they    (storage dtype; of the base as well
           are read one after another                                 where it is read with streamed deltas)
         + deltas in memory as a whole, or a chunk of each           (compute dtype; `Item.reading`)
         + the method's workspace, its result included unless it is  (compute dtype, declared by the method)
           a sum that is written chunk by chunk (`combine`)
         + for steps of post-processing: the result and its thin SVD, when that is more than the method's workspace
         + statistics in memory: one expert's for a one-pass method, else T (and one as stored: half of a Gram)
         + a packed copy of the result where blocks or a transposed layout need one

A method is called on one region at a time (`planning.regions`), so the largest region counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.checkpoints.base import torch_dtype
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.linalg.svd import svd_workspace
from actmat.methods import get_method
from actmat.methods.contract import MergeMethod
from actmat.planning.choose import has_spectrum
from actmat.planning.item import Item, MethodCall, Reading
from actmat.planning.regions import CHUNK, Region

BASELINE_BYTES = 300_000_000
"""Anonymous memory of the process itself with torch loaded; see `evidence/benchmarks/memory.py`."""

ITEM_BYTES, SOURCE_BYTES = 6_000, 1_000
"""Memory that stays with each item of a run, and with each of its experts: plan, headers, place of the journal's line.
At most 7.3 and 11.8 kB were measured with 2 and 8 experts (20,000 tensors of 16 entries, 2026-11-22)."""

MATRIX_BYTES = 120_000_000
"""Bytes that one worker's linear algebra library keeps (packing buffers, scratch), on top of the declared
workspace of a method."""

NOMINAL_FLOPS, NOMINAL_BYTES = 5e10, 5e8
"""Operations and bytes per second of a typical core. They are constants, not measured: order of units and shares
of parts follow from them, and must be the same on all machines."""


def region_peak_bytes(region: Region, item: Item, reading: Reading, width: int) -> int:
    """Peak of one call on deltas that are read in this way, in bytes; `width`: of an entry of the compute dtype."""
    call, n_experts = call_of(item), len(item.sources)
    method = get_method(call.method)
    by_matrix = method.acts_on == "matrix"
    matrices = region.layout.matrix_shapes(region.shape) if by_matrix else [region.shape]
    single = len(matrices) == 1 and region.layout.orientation == "OI"
    entries = reading.whole_deltas(n_experts) * region.numel or n_experts * min(region.numel, CHUNK_ENTRIES)
    workspace = max(method.cost.workspace(shape, n_experts, call.options) for shape in matrices)
    if reading.strategy == "combine":
        workspace -= region.numel
    elif method.uses_base(call.options):
        entries += region.numel
    base = (region.numel if reading.base_held else min(CHUNK, region.numel)) * base_itemsize(item)
    at_once = n_experts if method.acts_on == "elementwise" and reading.strategy != "each" else 1
    raw = base + at_once * CHUNK * 8
    if call.post and len(region.shape) > 1 and has_spectrum(region.layout):
        # a thin SVD, the response of one expert along its directions in float64, and the result in float64
        shapes = [shape[-2:] for shape in region.layout.matrix_shapes(region.shape)]
        workspace = max(workspace, region.numel + max(svd_workspace(*s) + 6 * math.prod(s) for s in shapes))
    packed = 0 if single or not by_matrix else region.numel + sum(math.prod(m) for m in matrices)
    return (
        raw
        + library_bytes(item)
        + statistics_bytes(method, matrices, n_experts, width)
        + width * (entries + workspace + packed)
    )


def base_itemsize(item: Item) -> int:
    """Bytes per entry of the base as stored."""
    return int(torch_dtype(item.base_dtype).itemsize)


def library_bytes(item: Item) -> int:
    """Bytes that the linear algebra library keeps on the host for the method of an item."""
    call = call_of(item)
    return MATRIX_BYTES if get_method(call.method).acts_on == "matrix" or call.post else 0


def distinct_regions(regions: Sequence[Region]) -> list[Region]:
    """One region of each shape and layout."""
    return list({(p.shape, p.layout.orientation, p.layout.blocks): p for p in regions}.values())


def statistics_bytes(method: MergeMethod, matrices: Sequence[Sequence[int]], n_experts: int, width: int) -> int:
    """Bytes of the statistics in memory during a call, and of one as it is stored (float64 at most)."""
    alive = 1 if method.access.one_pass else n_experts
    if "gram" in method.needs_statistics:
        return max(shape[-1] ** 2 * (alive * width + 8) for shape in matrices)
    if "fisher" in method.needs_statistics:
        return max(math.prod(shape) * (alive * width + 8) for shape in matrices)
    return 0


def factored_bytes(shape: tuple[int, ...], total_rank: int) -> int:
    """Memory of a factored merge: all factors, two bases, their products and the result, in float64."""
    *batch, rows, columns = shape
    core = min(total_rank, max(rows, columns))  # no basis has more vectors
    return 8 * math.prod(batch) * (6 * (rows + columns) * total_rank + 12 * total_rank * core)


def factored_region_bytes(region: Region, item: Item, width: int) -> int:
    """Peak of the merge of a region by its factors: the factors, the base, its product in float64 and as written."""
    total_rank = sum(max(1, s.rank) for s in item.sources if s is not None)
    columns = max(1, math.prod(region.shape[1:]))
    factors = factored_bytes((region.numel // columns, columns), total_rank)
    return factors + MATRIX_BYTES + region.numel * (base_itemsize(item) + 8 + 2 * width) + CHUNK * 8


def module_bytes(item: Item, width: int) -> int:
    """Peak of the merge of a module of adapters: its factors, and its dense deltas where the method takes them."""
    call, n_experts = call_of(item), len(item.sources)
    method = get_method(call.method)
    peak = factored_bytes(item.shape, sum(item.module.ranks))
    if not item.is_factored:
        size = method.cost.workspace(item.shape, n_experts, call.options)
        peak += item.numel * width * (n_experts + 6) + size * width
        peak = max(peak, factored_bytes(item.shape, min(item.shape[-2:])))  # a delta of full rank is decomposed
    return peak + (statistics_bytes(method, [item.shape], n_experts, 8) if item.target.measured else 0)


def svd_bytes(item: Item, width: int) -> int:
    """Memory of a merged delta, of its decomposition, and of the factors and their error in float64."""
    factors = 8 * item.write.rank * sum(item.shape)
    return width * (item.numel + svd_workspace(*item.shape)) + 2 * factors + 16 * item.numel + MATRIX_BYTES


def nominal_seconds(item: Item) -> float:
    """Time of one typical core for an item: its traffic, and the operations of its method; a guide."""
    traffic = (item.cost.read_bytes + item.cost.write_bytes) / NOMINAL_BYTES
    return traffic if item.call is None else traffic + _operations(item, item.call) / NOMINAL_FLOPS


def _operations(item: Item, call: MethodCall) -> float:
    """Operations of an item's method, steps and decomposition; without reading, subtracting, adding and writing."""
    method, n_experts = get_method(call.method), len(item.sources)
    shape = item.shape if len(item.shape) > 1 else (1, item.numel)
    short = min(shape[-2:])
    if item.is_factored:  # two common bases, and a product of factors with a base
        rank = sum(s.rank for s in item.sources if s is not None)
        total = 6.0 * rank * min(rank, short) * item.numel / short + 2.0 * item.numel * rank * item.has_base
    else:
        by_matrix = method.acts_on == "matrix" and not item.is_module
        matrices = item.layout.matrix_shapes(item.shape) if by_matrix else [shape]
        total = sum(method.cost.operations(matrix, n_experts, call.options) for matrix in matrices)
    decomposed = 7 * len(call.post) * short + (6 * short if item.write.kind == "svd" else 0)
    truncated = 10 * min(item.write.rank, short) if item.is_module and not item.is_factored else 0
    return total + 2.0 * item.numel * (decomposed + truncated)


def call_of(item: Item) -> MethodCall:
    """The method of an item that has one."""
    assert item.call is not None, "only items with a method"
    return item.call
