"""Sums over the records of a merge, for its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actmat.engine.record import Record
from actmat.planning.model import Item, MergePlan


@dataclass(frozen=True, slots=True)
class Norms:
    """Frobenius norms over all tensors or modules that were merged by a method.

    Args:
        merged: of the merged delta.
        total: of the sum of the experts' deltas.
        experts: of each expert's delta.
    """

    merged: float
    total: float
    experts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all items of one output.

    Args:
        unchanged: tensors to be merged or averaged that no expert changes.
        relative_error: of the truncation of an adapter, `sqrt(sum error^2 / sum norm^2)`, what is left out included.
        norms: over all merges by a method; of a model from a sample of entries. None without such merges.
        vanished: tensors whose deltas are too small for the numbers of the merge, and count as zero.
    """

    unchanged: int = 0
    relative_error: float = 0.0
    norms: Norms | None = None
    vanished: int = 0


LEAST_NORM = 1e-150
"""Norm below which squares of float64 underflow."""


def totals_of(plan: MergePlan, records: Mapping[str, Record]) -> Totals:
    """Totals of the items that have a record. Sizes are measured on a sample, those of merged factors exactly."""
    unchanged = vanished = 0
    errors: list[tuple[float, float]] = []
    squares: list[list[float]] = []
    for item in plan.items:
        if (record := records.get(item.name)) is None:  # tied to another, or a copy in a merge that is only measured
            continue
        size = record.stats if item.is_module and "sum_norm" in record.stats else record.size
        is_same = record.unchanged and item.action in ("merge", "average")
        unchanged += is_same
        if size is not None:
            # squares of the merge underflowed
            is_gone = not size["norm"] and 0 < max(size["expert_norms"], default=0) < LEAST_NORM
            squares.append([x**2 for x in (size["norm"], size["sum_norm"], *size["expert_norms"])])
        vanished += (is_same and _differs(item, record)) or (size is not None and is_gone)
        lost = "norm" if item.is_extracted and item.write.kind == "nothing" else "error_norm"
        if plan.output == "adapter" and lost in record.stats:
            errors.append((record.stats[lost] ** 2, record.stats["norm"] ** 2))
    merged, total, *experts = [math.sqrt(math.fsum(c)) for c in zip(*squares, strict=True)] or (0.0, 0.0)
    norms = Norms(merged, total, tuple(experts)) if squares else None
    norm = math.fsum(n for _, n in errors)
    relative_error = math.sqrt(math.fsum(e for e, _ in errors) / norm) if norm else 0.0
    return Totals(unchanged, relative_error, norms, vanished)


def _differs(item: Item, record: Record) -> bool:
    """True for a float64 tensor of an expert that is not the base's, by their hashes."""
    pairs = zip(record.expert_hashes, item.expert_dtypes, strict=False)
    return item.base_dtype == "float64" and any(h != record.base_hash for h, d in pairs if d == "float64")
