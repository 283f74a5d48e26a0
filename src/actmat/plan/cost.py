"""Memory that one worker needs for one tensor, from shapes alone.

    peak = raw base + raw chunk of each expert                       (storage dtype; of the base as well
                                                                      where it is read with streamed deltas)
         + deltas alive: one for a one-pass rule, a place of each    (compute dtype)
           for one that streams, else T
         + the rule's workspace, its result included unless it is    (compute dtype, declared by the rule)
           a sum that is written place by place (`combine`)
         + for a cap on singular values: the result and its thin SVD, when that is more than the rule's workspace
         + statistics alive: one expert's for a one-pass rule, else T (and one as stored: half of a Gram)
         + a packed copy of the result where blocks or a transposed layout need one

A rule is called on one part at a time (`plan.parts`), so the largest part counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import torch_dtype
from actmat.layout.types import Role
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.methods.contract import MergeMethod
from actmat.plan.parts import CHUNK, Part
from actmat.plan.reading import reading_of
from actmat.recipe import Postprocess

__all__ = ["BASELINE_BYTES", "part_peak_bytes", "statistics_bytes", "tensor_peak_bytes"]

BASELINE_BYTES = 300_000_000
"""Anonymous memory of the process itself with torch loaded; see `benchmarks/memory.py`."""


MATRIX_BYTES = 120_000_000
"""What one worker's linear algebra library keeps for itself (packing buffers, scratch), beside what a rule declares."""


def part_peak_bytes(
    part: Part,
    method: MergeMethod,
    n_experts: int,
    options: Mapping[str, Any],
    base_itemsize: int,
    compute_dtype: str,
    *,
    caps: Postprocess | None = None,
    walks: bool = True,
) -> int:
    """Peak of one call, in bytes; `caps` look at the deltas again after the rule, and may decompose the result.

    `walks`: whether a rule that streams is given its deltas place by place here (`adapter_experts.can_walk`).
    """
    width = int(torch_dtype(compute_dtype).itemsize)
    capped = caps is not None and caps.caps
    matrices = part.layout.matrix_shapes(part.shape) if method.acts_on == "matrix" else [part.shape]
    single = len(matrices) == 1 and part.layout.orientation == "OI"
    how = reading_of(method, options, part, n_experts, width, can_walk=walks, measured=capped)
    alive = how.deltas(n_experts) * part.numel or n_experts * min(part.numel, CHUNK_ENTRIES)
    workspace = max(_workspace(method, shape, n_experts, options) for shape in matrices)
    if how.combined:
        workspace -= part.numel
    elif method.uses_base(options):
        alive += part.numel
    base = (part.numel if how.base else CHUNK) * base_itemsize
    raw = base + (n_experts if method.acts_on == "elementwise" else 1) * CHUNK * 8
    if caps is not None and caps.singular_value_cap is not None and _has_singular_values(part):
        workspace = max(workspace, part.numel + max(_svd_workspace(m) for m in part.layout.matrix_shapes(part.shape)))
    packed = 0 if single or method.acts_on != "matrix" else part.numel + sum(math.prod(m) for m in matrices)
    library = MATRIX_BYTES if method.acts_on == "matrix" else 0
    measured_bytes = statistics_bytes(method, matrices, n_experts, width)
    return raw + library + measured_bytes + width * (alive + workspace + packed)


def tensor_peak_bytes(
    parts: Sequence[Part],
    method: MergeMethod,
    n_experts: int,
    options: Mapping[str, Any],
    base_itemsize: int,
    compute_dtype: str,
    *,
    caps: Postprocess | None = None,
    walks: bool = True,
) -> int:
    """Peak over the parts of a tensor, in bytes."""
    shapes = {(p.shape, p.layout.orientation, p.layout.blocks): p for p in parts}.values()
    return max(
        part_peak_bytes(p, method, n_experts, options, base_itemsize, compute_dtype, caps=caps, walks=walks)
        for p in shapes
    )


def _has_singular_values(part: Part) -> bool:
    role = part.layout.role
    return len(part.shape) > 1 and (role.is_matrix or role is Role.CONVOLUTION)


def _svd_workspace(shape: Sequence[int]) -> int:
    """A thin SVD in LAPACK's divide and conquer: a copy, the factors, its scratch, and their product again."""
    short = min(shape[-2:])
    return 3 * math.prod(shape) + 6 * short**2


def statistics_bytes(method: MergeMethod, matrices: Sequence[Sequence[int]], n_experts: int, width: int) -> int:
    """Bytes of Gram matrices or Fisher tensors alive during a call, and of one as it is stored (float64 at most)."""
    alive = 1 if method.one_pass else n_experts
    if "gram" in method.needs_statistics:
        return max(shape[-1] ** 2 * (alive * width + 8) for shape in matrices)
    if "fisher" in method.needs_statistics:
        return max(math.prod(shape) * (alive * width + 8) for shape in matrices)
    return 0


def _workspace(method: MergeMethod, shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    return math.prod(shape) if method.workspace is None else method.workspace(shape, n_experts, options)
