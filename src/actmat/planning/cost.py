"""Cost of one item, from shapes: memory of one worker, floating-point operations, and their time on a usual core.

    peak = raw base + raw chunk of each expert, of one where they    (storage dtype; of the base as well
           are read one after another                                 where it is read with streamed deltas)
         + deltas in memory as a whole, or a chunk of each           (compute dtype; `plan.reading`)
         + the method's workspace, its result included unless it is  (compute dtype, declared by the method)
           a sum that is written chunk by chunk (`combine`)
         + for a cap on singular values: the result and its thin SVD, when that is more than the method's workspace
         + statistics in memory: one expert's for a one-pass method, else T (and one as stored: half of a Gram)
         + a packed copy of the result where blocks or a transposed layout need one

A method is called on one region at a time (`plan.regions`), so the largest region counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.base import torch_dtype
from actmat.layout.types import Role
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.linalg.operations import Operation, entries, repeated
from actmat.linalg.svd import svd_workspace
from actmat.methods.contract import MergeMethod
from actmat.methods.spaces import Space
from actmat.planning.reading import Access, reading_of
from actmat.planning.regions import CHUNK, Region
from actmat.recipe import Postprocess

__all__ = [
    "BASELINE_BYTES",
    "ITEM_BYTES",
    "MATRIX_BYTES",
    "NOMINAL_BYTES",
    "NOMINAL_FLOPS",
    "SOURCE_BYTES",
    "CallShape",
    "factored_bytes",
    "method_operations",
    "nominal_seconds",
    "region_peak_bytes",
    "statistics_bytes",
    "tensor_peak_bytes",
]

BASELINE_BYTES = 300_000_000
"""Anonymous memory of the process itself with torch loaded; see `benchmarks/memory.py`."""

ITEM_BYTES, SOURCE_BYTES = 6_000, 1_000
"""Memory that stays with each item of a run, and with each of its experts: plan, headers, place of the journal's line.
`benchmarks/small_tensors.py` measures both."""

MATRIX_BYTES = 120_000_000
"""Bytes that one worker's linear algebra library keeps (packing buffers, scratch), on top of the declared
workspace of a method."""

NOMINAL_FLOPS, NOMINAL_BYTES = 5e10, 5e8
"""Operations and bytes per second of a usual core. They are constants, not measured: the order of units and the shares
of parts follow from them, and must be the same on all machines."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """Everything that decides the memory of a method's calls, apart from the tensor.

    Args:
        method, options: what is called.
        n_experts: number of deltas.
        base_itemsize: bytes per entry of the base as stored.
        compute_dtype: dtype of the deltas.
        caps: limits on the result, which look at the deltas again and may decompose the result.
        chunkable, costly: see `plan.reading.Access`.
        post: whether steps of post-processing follow, which decompose the result.
        space: in which the method works.
    """

    method: MergeMethod
    options: Mapping[str, Any]
    n_experts: int
    base_itemsize: int
    compute_dtype: str
    caps: Postprocess = field(default_factory=Postprocess)
    chunkable: bool = True
    post: bool = False
    space: Space = "full"
    costly: bool = False

    @property
    def observed(self) -> bool:
        """True if more than the method looks at the deltas, which are then whole."""
        return self.caps.caps or self.post or self.space != "full"

    @property
    def library_bytes(self) -> int:
        """Bytes that the linear algebra library keeps on the host."""
        return MATRIX_BYTES if self.method.acts_on == "matrix" or self.post or self.space != "full" else 0


def region_peak_bytes(region: Region, call: CallShape) -> int:
    """Peak of one call, in bytes."""
    method, n_experts = call.method, call.n_experts
    width = int(torch_dtype(call.compute_dtype).itemsize)
    by_matrix = method.acts_on == "matrix"
    matrices = region.layout.matrix_shapes(region.shape) if by_matrix else [region.shape]
    single = len(matrices) == 1 and region.layout.orientation == "OI"
    access = Access(chunkable=call.chunkable, costly=call.costly, observed=call.observed)
    how = reading_of(method, call.options, region, n_experts, width, access)
    entries = how.whole_deltas(n_experts) * region.numel or n_experts * min(region.numel, CHUNK_ENTRIES)
    workspace = max(method.cost.workspace(shape, n_experts, call.options) for shape in matrices)
    if how.strategy == "combine":
        workspace -= region.numel
    elif method.uses_base(call.options):
        entries += region.numel
    base = (region.numel if how.base_held else min(CHUNK, region.numel)) * call.base_itemsize
    at_once = n_experts if method.acts_on == "elementwise" and how.strategy != "each" else 1
    raw = base + at_once * CHUNK * 8
    if call.caps.singular_value_cap is not None and _has_singular_values(region):
        workspace = max(
            workspace, region.numel + max(_svd_workspace(m) for m in region.layout.matrix_shapes(region.shape))
        )
    if call.post and _has_singular_values(region):
        workspace = max(
            workspace, region.numel + max(_step_workspace(m) for m in region.layout.matrix_shapes(region.shape))
        )
    packed = 0 if single or not by_matrix else region.numel + sum(math.prod(m) for m in matrices)
    return (
        raw
        + call.library_bytes
        + statistics_bytes(method, matrices, n_experts, width)
        + width * (entries + workspace + packed)
    )


def tensor_peak_bytes(
    regions: Sequence[Region], call: CallShape, peak: Callable[[Region, CallShape], int] = region_peak_bytes
) -> int:
    """Largest `peak` of the regions of a tensor, in bytes."""
    different = {(p.shape, p.layout.orientation, p.layout.blocks): p for p in regions}.values()
    return max(peak(p, call) for p in different)


def _has_singular_values(region: Region) -> bool:
    role = region.layout.role
    return len(region.shape) > 1 and (role.is_matrix or role is Role.CONVOLUTION)


def _svd_workspace(shape: Sequence[int]) -> int:
    """A thin SVD in LAPACK's divide and conquer: a copy, the factors, its scratch, and their product again."""
    short = min(shape[-2:])
    return 3 * math.prod(shape) + 6 * short**2


def _step_workspace(shape: Sequence[int]) -> int:
    """A thin SVD, the response of one expert along its directions in float64, and the result in float64."""
    return svd_workspace(*shape[-2:]) + 6 * math.prod(shape[-2:])


def statistics_bytes(method: MergeMethod, matrices: Sequence[Sequence[int]], n_experts: int, width: int) -> int:
    """Bytes of the statistics in memory during a call, and of one as it is stored (float64 at most)."""
    alive = 1 if method.access.one_pass else n_experts
    if "gram" in method.needs_statistics:
        return max(shape[-1] ** 2 * (alive * width + 8) for shape in matrices)
    if "fisher" in method.needs_statistics:
        return max(math.prod(shape) * (alive * width + 8) for shape in matrices)
    return 0


def nominal_seconds(flops: int, traffic: int) -> float:
    """Time of one usual core for so many operations and bytes read and written.

    >>> nominal_seconds(10**11, 10**9)
    4.0
    """
    return flops / NOMINAL_FLOPS + traffic / NOMINAL_BYTES


def factored_bytes(shape: tuple[int, ...], total_rank: int) -> int:
    """Memory of a factored merge: all factors, two bases, their products and the result, in float64."""
    *batch, rows, columns = shape
    return 8 * math.prod(batch) * (6 * (rows + columns) * total_rank + 12 * total_rank * total_rank)


_TERM = re.compile(r"(?:\((?P<sum>[^)]*)\)|(?P<factor>[\dT^ ]*?))\s*N\^(?P<power>[23])(?P<log> log N)?")


def method_operations(
    method: MergeMethod,
    matrices: Sequence[Sequence[int]],
    n_experts: int,
    options: Mapping[str, Any],
    *,
    double: bool = False,
) -> list[Operation]:
    """Operations of a method on these logical matrices (or tensors), by class.

    A method that declares none is counted by its declared leading term: `N^2` is the entries of a matrix, `N^3` its
    entries times its input features, `log N` the base-2 logarithm of these, rounded up.

    Args:
        double: the method computes in float64.

    >>> from actmat.methods import get_method
    >>> average = get_method("average")  # T N^2
    >>> [(o.kind, o.flops) for o in method_operations(average, [(8, 4)], 3, {})]
    [('entry', 96)]
    """
    found: list[Operation] = []
    for shape, count in Counter(tuple(s) for s in matrices).items():
        if method.cost.operations is not None:
            found += repeated(method.cost.operations(shape, n_experts, options, double), count)
        elif (term := _TERM.match(method.cost.flops)) is not None:
            factor = sum(_term(t, n_experts) for t in (term["sum"] or term["factor"] or "1").split("+"))
            factor *= count * max(1, (shape[-1] - 1).bit_length()) if term["log"] else count
            if term["power"] == "2":
                found.append(entries(factor * math.prod(shape)))
            else:
                found.append(Operation("product", factor * math.prod(shape) * shape[-1]))
    return found


def _term(text: str, n_experts: int) -> int:
    """Value of a term such as `2T`, `T^2`, `45`."""
    number, _, power = text.strip().partition("T")
    value = int(number) if number.strip() else 1
    if "T" in text:
        for _ in range(int(power.removeprefix("^")) if power.startswith("^") else 1):
            value *= n_experts
    return value
