"""Sums over the records of a merge, for its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actmat.engine.task import Record
from actmat.plan.model import MergePlan

__all__ = ["Norms", "Totals", "sum_records"]


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
        nonfinite: NaN and Inf that counted as unchanged.
        relative_error: of the truncation of an adapter, `sqrt(sum error^2 / sum norm^2)`.
        norms: of all that was merged by a method; of a model from a sample of entries. None where nothing was.
    """

    unchanged: int = 0
    nonfinite: int = 0
    relative_error: float = 0.0
    norms: Norms | None = None


def sum_records(plan: MergePlan, records: Mapping[str, Record]) -> Totals:
    """Totals of a finished output; every record is read once."""
    unchanged = nonfinite = 0
    errors: list[tuple[float, float]] = []
    squares: list[list[float]] = []
    for item in plan.items:
        if item.tied_to is not None and item.tied_to in records:
            nonfinite += records[item.tied_to].nonfinite
            continue
        record = records[item.name]
        unchanged += record.unchanged and item.action in ("merge", "average")
        nonfinite += record.nonfinite
        stats = record.stats if plan.output == "adapter" else {}
        if "error_norm" in stats:
            errors.append((stats["error_norm"] ** 2, stats["norm"] ** 2))
        by_sample = plan.output == "model" or plan.is_extracted
        size = record.size if by_sample else stats if "norm" in stats else None
        if size is not None:
            squares.append([x**2 for x in (size["norm"], size["sum_norm"], *size["expert_norms"])])
    return Totals(unchanged, nonfinite, _relative(errors), _norms(squares) if squares else None)


def _norms(squares: list[list[float]]) -> Norms:
    merged, total, *experts = (math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True))
    return Norms(merged, total, tuple(experts))


def _relative(errors: list[tuple[float, float]]) -> float:
    norm = math.fsum(n for _, n in errors)
    return math.sqrt(math.fsum(e for e, _ in errors) / norm) if norm else 0.0
