"""Sums over the records of a merge, for its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError

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


def recorded_totals(manifest: Mapping[str, Any]) -> Totals:
    """Totals of a finished output, from its manifest.

    Sizes are measured on a sample, those of merged factors exactly: `stats` has them then.

    Raises:
        CheckpointError: a number in it is missing, or not a number.
    """
    is_model = manifest.get("kind") != "adapter"
    unchanged = nonfinite = vanished = 0
    errors: list[tuple[float, float]] = []
    squares: list[list[float]] = []
    try:
        for row in manifest["tensors" if is_model else "modules"]:
            nonfinite += row.get("nonfinite", 0)
            if row.get("tied_to") is not None:
                continue
            stats = row.get("stats", {})
            size = stats if not is_model and "sum_norm" in stats else row.get("size")
            same = bool(row.get("unchanged")) and row["action"] in ("merge", "average")
            unchanged += same
            # squares of the merge underflowed
            gone = size is not None and not size["norm"] and 0 < max(size["expert_norms"], default=0) < LEAST_NORM
            vanished += (same and _differs(row)) or gone
            if not is_model and "error_norm" in stats:
                errors.append((stats["error_norm"], stats["norm"]))
            if size is not None:
                squares.append([x**2 for x in (size["norm"], size["sum_norm"], *size["expert_norms"])])
        merged, total, *experts = [math.sqrt(math.fsum(c)) for c in zip(*squares, strict=True)] or (0.0, 0.0)
        norms = Norms(merged, total, tuple(experts)) if squares else None
        return Totals(unchanged, nonfinite, relative_error(errors), norms, vanished)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} has no sizes that can be read ({error!r}).") from None


def _differs(row: Mapping[str, Any]) -> bool:
    """True for a float64 tensor of an expert that is not the base's, by their hashes."""
    (of_base, *hashes), dtypes = (row.get("input_hashes") or {"": ""}).values(), row.get("expert_dtypes", ())
    others = [h for h, d in zip(hashes, dtypes, strict=False) if d == FLOAT64]
    return row.get("dtype") == FLOAT64 and any(h != of_base for h in others)


def relative_error(pairs: Iterable[tuple[float, float]]) -> float:
    """`sqrt(sum error^2 / sum norm^2)` of errors and norms; 0 without a norm."""
    squares = [(error**2, norm**2) for error, norm in pairs]
    norm = math.fsum(n for _, n in squares)
    return math.sqrt(math.fsum(e for e, _ in squares) / norm) if norm else 0.0
