"""Checks of the merge. AM3xx: balance between experts; AM4xx: size of the merged delta; AM5xx: embeddings."""

from __future__ import annotations

import math

from actmat.diagnostics.checks.base import Check, Facts, Outcome
from actmat.diagnostics.model import MatrixRow
from actmat.diagnostics.warnings import COLLAPSED, EXPLODED

ORTHOGONAL = 0.1
"""Largest overlap of row spaces that counts as nearly orthogonal."""

LOW_RANK = 8
"""A delta is low-rank when its rank is at most this fraction (one eighth) of the layer's smaller side."""

ABOUT_SUM = 0.95
"""Norm of the merged delta against the sum's."""

SURPRISING = 3.0
"""Relative change of a table against the median matrix of the same expert."""


def _plain_sum(facts: Facts) -> Outcome:
    able = [m for m in facts.measures if _orthogonal_and_low_rank(m)]
    hits = [m for m in able if m.merged_norm >= ABOUT_SUM * m.sum_norm]
    if not hits or 2 * len(hits) < len(able):
        return None
    merged, total = (math.hypot(*(getattr(m, field) for m in hits)) for field in ("merged_norm", "sum_norm"))
    mean = math.hypot(*map(_mean_norm, hits))
    return (
        f"In {len(hits)} of {len(facts.measures)} matrices the experts are low-rank with nearly orthogonal row "
        f"spaces. An interference method has nothing to weigh there and gives about the plain sum: the merged norm "
        f"is {merged / total:.3g} of the sum's, {merged / mean:.3g} of the mean expert's. Such merges of adapters "
        "often do worse than the average: scale down (--scale 0.3 to 0.5), cap (postprocess: norm_cap: average), "
        "or merge by average",
        [m.name for m in hits],
    )


def _orthogonal_and_low_rank(m: MatrixRow) -> bool:
    present = [t for t, n in enumerate(m.norms) if n > 0]
    limit = min(m.shape) / LOW_RANK
    if len(present) < 2 or any(m.numerical_rank[t] > limit for t in present):
        return False
    if m.probes is not None and any(m.numerical_rank[t] >= m.probes for t in present):
        return False
    return max(m.subspace_overlap[s][t] for s in present for t in present if s != t) <= ORTHOGONAL


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
    tables = [r for r in facts.tensors if r.role == "embedding" and r.stats.get("base_norm")]
    medians = [facts.median_relative_norm(t) for t in range(len(facts.labels))]
    said, names = [], []
    for t, label in enumerate(facts.labels):
        usual = medians[t]
        if not usual:
            continue
        for row in tables:
            change = row.stats["norms"][t] / row.stats["base_norm"]
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
    Check("AM401", "Merge of low-rank experts is about their sum", "issue", _plain_sum),
    Check("AM402", "Merged delta is much larger than the experts'", "tip"),
    Check("AM403", "Merged delta collapsed or exploded", "issue", _out_of_bounds),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue"),
    Check("AM501", "Embeddings move more than the layers", "tip", _tables_move),
)
