"""Sums over the records of a merge, for its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.engine.task import Record
from actmat.errors import CheckpointError
from actmat.planning.model import MergePlan
from actmat.report.identity import identity_findings

FLOAT64 = "float64"


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
        norms: over all merges by a method; of a model from a sample of entries. None without such merges.
        vanished: tensors whose deltas are too small for the numbers of the merge, and count as zero.
        findings: codes and words of checks on the identity of base and experts; of a run, not of a finished output.
    """

    unchanged: int = 0
    nonfinite: int = 0
    relative_error: float = 0.0
    norms: Norms | None = None
    vanished: int = 0
    findings: tuple[tuple[str, str], ...] = ()


LEAST_NORM = 1e-150
"""Norm below which squares of float64 underflow."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Contribution of one item to the totals."""

    unchanged: bool
    nonfinite: int
    stats: Mapping[str, Any]
    size: Mapping[str, Any] | None
    differs: bool = False  # a float64 tensor of an expert from the base's, by their hashes

    @property
    def vanished(self) -> bool:
        """True for deltas that float32 rounded to zero, or a merge whose squares underflowed."""
        size = self.size or {"norm": 1.0}
        return (self.unchanged and self.differs) or (
            not size["norm"] and 0 < max(size["expert_norms"], default=0) < LEAST_NORM
        )


def sum_records(plan: MergePlan, records: Mapping[str, Record]) -> Totals:
    """Totals of a finished output; every record is read once."""

    def rows() -> Iterable[_Row]:
        for item in plan.items:
            if item.tied_to is not None and item.tied_to in records:
                yield _Row(False, records[item.tied_to].nonfinite, {}, None)
                continue
            record = records[item.name]
            unchanged = record.unchanged and item.action in ("merge", "average")
            kept = _row(plan.output == "model", unchanged, record.nonfinite, record.stats, record.size)
            hashes = [h for h, d in zip(record.expert_hashes, item.expert_dtypes, strict=False) if d == FLOAT64]
            yield replace(kept, differs=item.base_dtype == FLOAT64 and any(h != record.base_hash for h in hashes))

    return replace(_summed(rows()), findings=identity_findings(plan, records))


def recorded_totals(manifest: Mapping[str, Any]) -> Totals:
    """Totals of an output that an earlier run finished, from its manifest.

    Raises:
        CheckpointError: a number in it is missing, or not a number.
    """
    is_model = manifest.get("kind") != "adapter"

    def rows() -> Iterable[_Row]:
        for row in manifest["tensors" if is_model else "modules"]:
            if row.get("tied_to") is not None:
                yield _Row(False, row["nonfinite"], {}, None)
                continue
            unchanged = row.get("unchanged", False) and row["action"] in ("merge", "average")
            kept = _row(is_model, unchanged, row.get("nonfinite", 0), row.get("stats", {}), row.get("size"))
            (of_base, *hashes), dtypes = (row.get("input_hashes") or {"": ""}).values(), row.get("expert_dtypes", ())
            others = [h for h, d in zip(hashes, dtypes, strict=False) if d == FLOAT64]
            yield replace(kept, differs=row.get("dtype") == FLOAT64 and any(h != of_base for h in others))

    try:
        return _summed(rows())
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} has no sizes that can be read ({error!r}).") from None


def _row(
    is_model: bool, unchanged: bool, nonfinite: int, stats: Mapping[str, Any], size: Mapping[str, Any] | None
) -> _Row:
    """Sizes are measured on a sample, those of merged factors exactly: `stats` has them then."""
    exact = not is_model and "sum_norm" in stats
    return _Row(unchanged, nonfinite, {} if is_model else stats, stats if exact else size)


def _summed(rows: Iterable[_Row]) -> Totals:
    unchanged = nonfinite = vanished = 0
    errors: list[tuple[float, float]] = []
    squares: list[list[float]] = []
    for row in rows:
        unchanged += row.unchanged
        nonfinite += row.nonfinite
        vanished += row.vanished
        if "error_norm" in row.stats:
            errors.append((row.stats["error_norm"] ** 2, row.stats["norm"] ** 2))
        if row.size is not None:
            squares.append([x**2 for x in (row.size["norm"], row.size["sum_norm"], *row.size["expert_norms"])])
    return Totals(unchanged, nonfinite, _relative(errors), _norms(squares) if squares else None, vanished)


def _norms(squares: list[list[float]]) -> Norms:
    merged, total, *experts = (math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True))
    return Norms(merged, total, tuple(experts))


def _relative(errors: list[tuple[float, float]]) -> float:
    norm = math.fsum(n for _, n in errors)
    return math.sqrt(math.fsum(e for e, _ in errors) / norm) if norm else 0.0
