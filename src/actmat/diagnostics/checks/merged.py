"""Checks of the merge. AM3xx: balance between experts; AM4xx: size of the merged delta."""

from __future__ import annotations

import math

from actmat.diagnostics.checks.base import Check, Facts, Outcome
from actmat.diagnostics.model import MatrixRow
from actmat.diagnostics.warnings import COLLAPSED, EXPLODED


def _mean_norm(m: MatrixRow) -> float:
    """Root mean square of the experts' norms."""
    return math.hypot(*m.norms) / math.sqrt(len(m.norms))


def _out_of_bounds(facts: Facts) -> Outcome:
    gone = [m.name for m in facts.measures if m.merged_norm < COLLAPSED * _mean_norm(m)]
    burst = [m.name for m in facts.measures if m.merged_norm > EXPLODED * max(m.norms)]
    said = []
    if gone:
        said.append(f"below {COLLAPSED:g} times the mean expert's norm in {len(gone)} of {len(facts.measures)}")
    if burst:
        said.append(f"above {EXPLODED:g} times that of the largest expert in {len(burst)} of {len(facts.measures)}")
    if not said:
        return None
    return (
        f"The merged delta is {' and '.join(said)} matrices. Look at the rank and the cut-off there, and at the "
        "scale; solver=stacked or --set compute_dtype=float64 tell whether rounding is to blame",
        gone + burst,
    )


MERGE_CHECKS = (
    Check("AM301", "Experts of unequal size", "issue"),
    Check("AM402", "Merged delta is much larger than the experts'", "tip"),
    Check("AM403", "Merged delta collapsed or exploded", "issue", _out_of_bounds),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue"),
)
