"""Cost of one item, from shapes, kernel and reading: memory of one worker, operations, and time on a typical core.

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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.base import torch_dtype
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.linalg.operations import Operation, entries, product, repeated, thin_svd
from actmat.linalg.svd import svd_workspace
from actmat.methods import get_method
from actmat.methods.contract import MergeMethod
from actmat.planning.item import Item, MethodCall, Reading
from actmat.planning.post import has_spectrum
from actmat.planning.regions import CHUNK, Region
from actmat.recipe import Postprocess

BASELINE_BYTES = 300_000_000
"""Anonymous memory of the process itself with torch loaded; see `benchmarks/memory.py`."""

ITEM_BYTES, SOURCE_BYTES = 6_000, 1_000
"""Memory that stays with each item of a run, and with each of its experts: plan, headers, place of the journal's line.
At most 7.3 and 11.8 kB were measured with 2 and 8 experts (20,000 tensors of 16 entries, 2026-11-22)."""

MATRIX_BYTES = 120_000_000
"""Bytes that one worker's linear algebra library keeps (packing buffers, scratch), on top of the declared
workspace of a method."""

NOMINAL_FLOPS, NOMINAL_BYTES = 5e10, 5e8
"""Operations and bytes per second of a typical core. They are constants, not measured: order of units and shares
of parts follow from them, and must be the same on all machines."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """Everything that decides the memory of a method's calls, apart from the tensor and its reading.

    Args:
        method, options: of the call.
        n_experts: number of deltas.
        base_itemsize: bytes per entry of the base as stored.
        compute_dtype: dtype of the deltas.
        caps: a limit on the result, which reads the deltas again.
        post: whether steps of post-processing follow, which decompose the result.
    """

    method: MergeMethod
    options: Mapping[str, Any]
    n_experts: int
    base_itemsize: int
    compute_dtype: str
    caps: Postprocess = field(default_factory=Postprocess)
    post: bool = False

    @property
    def width(self) -> int:
        """Bytes per entry of the deltas."""
        return int(torch_dtype(self.compute_dtype).itemsize)

    @property
    def library_bytes(self) -> int:
        """Bytes that the linear algebra library keeps on the host."""
        return MATRIX_BYTES if self.method.acts_on == "matrix" or self.post else 0


def region_peak_bytes(region: Region, call: CallShape, reading: Reading) -> int:
    """Peak of one call on deltas that are read in this way, in bytes."""
    method, n_experts = call.method, call.n_experts
    by_matrix = method.acts_on == "matrix"
    matrices = region.layout.matrix_shapes(region.shape) if by_matrix else [region.shape]
    single = len(matrices) == 1 and region.layout.orientation == "OI"
    entries = reading.whole_deltas(n_experts) * region.numel or n_experts * min(region.numel, CHUNK_ENTRIES)
    workspace = max(method.cost.workspace(shape, n_experts, call.options) for shape in matrices)
    if reading.strategy == "combine":
        workspace -= region.numel
    elif method.uses_base(call.options):
        entries += region.numel
    base = (region.numel if reading.base_held else min(CHUNK, region.numel)) * call.base_itemsize
    at_once = n_experts if method.acts_on == "elementwise" and reading.strategy != "each" else 1
    raw = base + at_once * CHUNK * 8
    if call.post and len(region.shape) > 1 and has_spectrum(region.layout):
        # a thin SVD, the response of one expert along its directions in float64, and the result in float64
        shapes = [shape[-2:] for shape in region.layout.matrix_shapes(region.shape)]
        workspace = max(workspace, region.numel + max(svd_workspace(*s) + 6 * math.prod(s) for s in shapes))
    packed = 0 if single or not by_matrix else region.numel + sum(math.prod(m) for m in matrices)
    return (
        raw
        + call.library_bytes
        + statistics_bytes(method, matrices, n_experts, call.width)
        + call.width * (entries + workspace + packed)
    )


def tensor_peak_bytes(regions: Sequence[Region], call: CallShape, reading: Reading) -> int:
    """Largest peak of the regions of a tensor, in bytes."""
    return max(region_peak_bytes(region, call, reading) for region in different(regions))


def different(regions: Sequence[Region]) -> list[Region]:
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


def nominal_seconds(flops: int, traffic: int) -> float:
    """Time of one typical core for these operations and bytes read and written.

    >>> nominal_seconds(10**11, 10**9)
    4.0
    """
    return flops / NOMINAL_FLOPS + traffic / NOMINAL_BYTES


def factored_bytes(shape: tuple[int, ...], total_rank: int) -> int:
    """Memory of a factored merge: all factors, two bases, their products and the result, in float64."""
    *batch, rows, columns = shape
    core = min(total_rank, max(rows, columns))  # no basis has more vectors
    return 8 * math.prod(batch) * (6 * (rows + columns) * total_rank + 12 * total_rank * core)


def factored_tensor_bytes(region: Region, call: CallShape, total_rank: int) -> int:
    """Peak of the merge of a region by its factors: the factors, the base, its product in float64 and as written."""
    columns = max(1, math.prod(region.shape[1:]))
    factors = factored_bytes((region.numel // columns, columns), total_rank)
    return factors + MATRIX_BYTES + region.numel * (call.base_itemsize + 8 + 2 * call.width) + CHUNK * 8


def method_operations(
    method: MergeMethod,
    matrices: Sequence[Sequence[int]],
    n_experts: int,
    options: Mapping[str, Any],
    *,
    double: bool = False,
) -> list[Operation]:
    """Operations of a method on these logical matrices, `*batch O I` (or tensors), by class.

    Args:
        double: the method computes in float64.
    """
    found: list[Operation] = []
    for shape, count in Counter(tuple(s) for s in matrices).items():
        batch, one = (shape[:-2], shape[-2:]) if method.acts_on == "matrix" else ((), shape)
        found += repeated(method.cost.operations(one, n_experts, options, double), count * math.prod(batch))
    return found


def item_operations(item: Item, compute_dtype: str) -> list[Operation]:
    """Operations of the method of an item, without reading, subtracting, adding to the base and writing.

    Args:
        item: of a plan; a tensor or an adapter's module.
        compute_dtype: the recipe's.
    """
    if item.call is None:
        return []
    method, double = get_method(item.call.method), compute_dtype == "float64"
    steps = _steps(item, item.call, double=double)
    if item.form == "factored":
        return [*_factored(item, item.call), *steps]
    shapes = [item.shape or (1,)]
    if method.acts_on == "matrix" and item.factors is None:
        shapes = item.layout.matrix_shapes(item.shape)
    found = method_operations(method, shapes, len(item.sources), item.call.options, double=double)
    if item.factors is not None:  # deltas are formed from their factors, and the merged one is decomposed again
        *batch, rows, columns = item.shape
        rank = max(sum(item.factors.ranks), 1)
        formed = [product(rows, columns, rank), product(rows, columns, max(min(rank, rows, columns), 1))]
        found += repeated(formed, math.prod(batch))
    return [*found, *steps]


def _steps(item: Item, call: MethodCall, *, double: bool) -> list[Operation]:
    """Each step decomposes the merged matrix and multiplies it out; some measure every expert along its directions."""
    if not call.post:
        return []
    shapes, inner = item.layout.matrix_shapes(item.shape), None
    if item.form == "factored":
        total = sum(item.factors.ranks if item.factors is not None else [s.rank for s in item.sources if s is not None])
        shapes, inner = [item.shape], max(1, total)
    found = []
    for *batch, rows, columns in shapes:
        kept = min(rows, columns, inner or rows)
        wide, long = (rows, columns) if inner is None else (kept, kept)
        once = [*thin_svd(wide, long, kept, double=double or inner is not None)]
        once += [product(rows, columns, kept)] * (1 + len(item.sources))
        found += repeated(once, len(call.post) * math.prod(batch))
    return found


def _factored(item: Item, call: MethodCall) -> list[Operation]:
    """Two common bases of the factors by QR, the merge of small cores, and its product with the bases, in float64."""
    *batch, rows, columns = item.shape
    ranks = [0 if s is None else s.rank for s in item.sources] if item.factors is None else list(item.factors.ranks)
    total = max(1, sum(ranks))
    left, right = min(total, rows), min(total, columns)
    bases = [product(rows, left, total), product(columns, right, total)]
    cores = [product(left, right, rank) for rank in ranks if rank]
    rule = method_operations(get_method(call.method), [(left, right)], len(ranks), call.options, double=True)
    lifted = [product(rows, right, left)]
    if item.factors is None:  # a tensor of a full model
        lifted += [product(rows, columns, right), entries(2 * rows * columns)]
    return repeated([*repeated(bases, 2), *cores, *rule, *lifted], math.prod(batch))
