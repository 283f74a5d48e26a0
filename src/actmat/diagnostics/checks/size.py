"""AM4xx: size of the merged delta."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.diagnostics.checks.base import Check, Facts, Outcome, clear, found, not_applicable
from actmat.diagnostics.model import Measure

__all__ = ["SIZE_CHECKS", "size_warning"]

ORTHOGONAL = 0.1
"""Largest overlap of row spaces that counts as nearly orthogonal."""

LOW_RANK = 8
"""A delta is low-rank when its rank is at most this fraction (one eighth) of the layer's smaller side."""

ABOUT_SUM = 0.95
"""Norm of the merged delta against the sum's."""

FAR = 3.0
"""Norm of the merged delta against the mean expert's: farther from the base than anything that was trained."""

COLLAPSED, EXPLODED = 0.1, 10.0
"""Norm against the mean delta's; against the largest expert's."""


def _plain_sum(facts: Facts) -> Outcome:
    able = [m for m in facts.measures if _orthogonal_and_low_rank(m)]
    if not able:
        return not_applicable("there are no two low-rank experts with nearly orthogonal row spaces in any matrix")
    hits = [m for m in able if m.merged_norm >= ABOUT_SUM * m.sum_norm]
    if 2 * len(hits) >= len(able):
        merged, total, mean = _sizes(hits)
        return found(
            f"In {len(hits)} of {len(facts.measures)} matrices the experts are low-rank with nearly orthogonal row "
            f"spaces. There an interference rule has nothing to weigh and gives about the plain sum: the merged norm "
            f"is {merged / total:.3g} of the sum's, {merged / mean:.3g} of the mean expert's. Such merges of adapters "
            "often do worse than the average: scale down (--scale 0.3 to 0.5), cap (postprocess: norm_cap: average), "
            "or merge by average",
            [m.name for m in hits],
        )
    return clear("low-rank experts with nearly orthogonal row spaces are not merged at the size of their sum")


def _orthogonal_and_low_rank(m: Measure) -> bool:
    there = [t for t, n in enumerate(m.norms) if n > 0]
    limit = min(m.shape) / LOW_RANK
    if len(there) < 2 or any(m.numerical_rank[t] > limit for t in there):
        return False
    if m.probes is not None and any(m.numerical_rank[t] >= m.probes for t in there):
        return False
    return max(m.subspace_overlap[s][t] for s in there for t in there if s != t) <= ORTHOGONAL


def _far_out(facts: Facts) -> Outcome:
    merged, total, mean = _sizes(facts.measures)
    if mean == 0:
        return not_applicable("no expert changes a matrix")
    words = f"{merged / mean:.3g} times the mean expert's norm, {merged / total:.3g} times the sum's" if total else ""
    if merged > FAR * mean:
        return found(
            f"The merged delta has {words}: the model is moved farther than any expert was. That is where the best "
            "merges of fully fine-tuned experts of a strong base lie, and the worst of a weak one. Compare, on inputs "
            "of the tasks ('actmat tune', no labels needed), with a lower scale, a cap (postprocess: norm_cap: "
            "average), or actmat_bounded, which is never longer than the average",
            [m.name for m in facts.measures if m.merged_norm > FAR * _mean_norm(m)],
        )
    return clear(f"the merged delta has {words}" if words else "the deltas cancel in the sum")


def _sizes(measures: Sequence[Measure]) -> tuple[float, float, float]:
    """Norms over all matrices of the merged delta, of the sum, and of the root mean square expert."""
    merged, total = (math.hypot(*(getattr(m, field) for m in measures)) for field in ("merged_norm", "sum_norm"))
    return merged, total, math.hypot(*map(_mean_norm, measures))


def _mean_norm(m: Measure) -> float:
    """Root mean square of the experts' norms."""
    return math.hypot(*m.norms) / math.sqrt(len(m.norms))


def _out_of_bounds(facts: Facts) -> Outcome:
    if not facts.measures:
        return not_applicable("no expert changes a matrix")
    gone = [m.name for m in facts.measures if m.merged_norm < COLLAPSED * m.mean_norm]
    burst = [m.name for m in facts.measures if m.merged_norm > EXPLODED * max(m.norms)]
    said = []
    if gone:
        said.append(f"below {COLLAPSED:g} times the norm of the mean delta in {len(gone)} of {len(facts.measures)}")
    if burst:
        said.append(f"above {EXPLODED:g} times that of the largest expert in {len(burst)} of {len(facts.measures)}")
    if said:
        return found(
            f"The merged delta is {' and '.join(said)} matrices. Look at the rank and the cut-off there, and at the "
            "scale; solver=stacked or --compute-dtype float64 tell whether rounding is to blame",
            gone + burst,
        )
    return clear("no merged delta has collapsed or exploded")


def size_warning(merged: float, total: float, experts: Sequence[float]) -> tuple[str, str] | None:
    """Code and words of what is wrong with the size of a whole merge; None where nothing is.

    The thresholds of AM402 and AM403, on norms over all merged tensors: every merge has them, also without a diagnosis.

    Args:
        merged: norm of the merged delta; `total`: of the sum of the experts' deltas; `experts`: of each.

    >>> size_warning(0.9, 1.0, [0.7, 0.7]) is None
    True
    >>> size_warning(20.0, 1.0, [0.7, 0.7])
    ('AM403', 'the merged delta exploded')
    """
    if not any(experts):
        return None
    if merged > EXPLODED * max(experts):
        return "AM403", "the merged delta exploded"
    if merged < COLLAPSED * total / len(experts):
        return "AM403", "the merged delta collapsed"
    if merged > FAR * math.hypot(*experts) / math.sqrt(len(experts)):
        return "AM402", "the merged delta is much larger than the experts'"
    return None


SIZE_CHECKS = (
    Check("AM401", "Merge of low-rank experts is about their sum", "issue", _plain_sum),
    Check("AM402", "Merged delta is much larger than the experts'", "tip", _far_out),
    Check("AM403", "Merged delta collapsed or exploded", "issue", _out_of_bounds),
)
