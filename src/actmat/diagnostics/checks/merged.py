"""Checks of the merge. AM3xx: balance between experts; AM4xx: size of the merged delta; AM5xx: embeddings."""

from __future__ import annotations

import math

from actmat.diagnostics.checks.base import Check, Facts, Outcome
from actmat.diagnostics.model import MatrixRow
from actmat.diagnostics.warnings import COLLAPSED, EXPLODED

SURPRISING = 3.0
"""Relative change of a table against the median matrix of the same expert."""


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


def _tables_move(facts: Facts) -> Outcome:
    tables = [r for r in facts.norms if r.role == "embedding" and r.base_norm]
    medians = [facts.median_relative_norm(t) for t in range(len(facts.labels))]
    said, names = [], []
    for t, label in enumerate(facts.labels):
        usual = medians[t]
        if not usual:
            continue
        for row in tables:
            change = row.norms[t] / row.base_norm
            if change > SURPRISING * usual:
                said.append(f"'{label}' changes {row.name} by {change:.2g} of its norm, its matrices by {usual:.2g}")
                names.append(row.name)
    if not said:
        return None
    return (
        f"Tables move more than the layers: {'; '.join(said[:3])}. New or re-initialized tokens do "
        "that, and the mean over experts dilutes them. Keep the base's table (--keep), or write a rule for it",
        names,
    )


MERGE_CHECKS = (
    Check("AM301", "Experts of unequal size", "issue"),
    Check("AM402", "Merged delta is much larger than the experts'", "tip"),
    Check("AM403", "Merged delta collapsed or exploded", "issue", _out_of_bounds),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue"),
    Check("AM501", "Embeddings move more than the layers", "tip", _tables_move),
)
