"""Checks of the merge. AM3xx: balance between experts; AM4xx: size of the merged delta; AM5xx: embeddings and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.diagnostics.checks.base import (
    Check,
    Facts,
    Outcome,
    check_of_every_merge,
    clear,
    finding,
    not_applicable,
)
from actmat.diagnostics.model import MatrixRow

BALANCE_CHECKS = (
    check_of_every_merge("AM301", "Experts of unequal size", "issue", "no expert has too little weight for its size"),
)


ORTHOGONAL = 0.1
"""Largest overlap of row spaces that counts as nearly orthogonal."""

LOW_RANK = 8
"""A delta is low-rank when its rank is at most this fraction (one eighth) of the layer's smaller side."""

ABOUT_SUM = 0.95
"""Norm of the merged delta against the sum's."""

FAR = 3.0
"""Norm of the merged delta against the mean expert's: farther from the base than anything that was trained."""

COLLAPSED, EXPLODED = 0.1, 10.0
"""Norm against the mean expert's; against the largest expert's."""

TRUNCATED = 0.3
"""Relative error of an adapter against its merge, due to its rank."""


def _plain_sum(facts: Facts) -> Outcome:
    able = [m for m in facts.measures if _orthogonal_and_low_rank(m)]
    if not able:
        return not_applicable("there are no two low-rank experts with nearly orthogonal row spaces in any matrix")
    hits = [m for m in able if m.merged_norm >= ABOUT_SUM * m.sum_norm]
    if 2 * len(hits) >= len(able):
        merged, total, mean = _sizes(hits)
        return finding(
            f"In {len(hits)} of {len(facts.measures)} matrices the experts are low-rank with nearly orthogonal row "
            f"spaces. An interference method has nothing to weigh there and gives about the plain sum: the merged norm "
            f"is {merged / total:.3g} of the sum's, {merged / mean:.3g} of the mean expert's. Such merges of adapters "
            "often do worse than the average: scale down (--scale 0.3 to 0.5), cap (postprocess: norm_cap: average), "
            "or merge by average",
            [m.name for m in hits],
        )
    return clear("low-rank experts with nearly orthogonal row spaces are not merged at the size of their sum")


def _orthogonal_and_low_rank(m: MatrixRow) -> bool:
    present = [t for t, n in enumerate(m.norms) if n > 0]
    limit = min(m.shape) / LOW_RANK
    if len(present) < 2 or any(m.numerical_rank[t] > limit for t in present):
        return False
    if m.probes is not None and any(m.numerical_rank[t] >= m.probes for t in present):
        return False
    return max(m.subspace_overlap[s][t] for s in present for t in present if s != t) <= ORTHOGONAL


def _far_out(facts: Facts) -> Outcome:
    merged, total, mean = _sizes(facts.measures)
    if mean == 0:
        return not_applicable("no expert changes a matrix")
    if facts.by_inputs:
        return not_applicable("the merge is made for the experts' inputs: answers kept on them judge it, not its size")
    words = f"{merged / mean:.3g} times the mean expert's norm, {merged / total:.3g} times the sum's" if total else ""
    if merged > FAR * mean:
        return finding(
            f"The merged delta has {words}: the model is moved farther than any expert was. Compare, on inputs of the "
            "tasks ('actmat tune', no labels needed), with a lower scale, or with a cap (postprocess: norm_cap: "
            "average)",
            [m.name for m in facts.measures if m.merged_norm > FAR * _mean_norm(m)],
        )
    return clear(f"the merged delta has {words}" if words else "the deltas cancel in the sum")


def _sizes(measures: Sequence[MatrixRow]) -> tuple[float, float, float]:
    """Norms over all matrices of the merged delta, of the sum, and of the root mean square expert."""
    merged, total = (math.hypot(*(getattr(m, field) for m in measures)) for field in ("merged_norm", "sum_norm"))
    return merged, total, math.hypot(*map(_mean_norm, measures))


def _mean_norm(m: MatrixRow) -> float:
    """Root mean square of the experts' norms."""
    return math.hypot(*m.norms) / math.sqrt(len(m.norms))


def _out_of_bounds(facts: Facts) -> Outcome:
    if not facts.measures:
        return not_applicable("no expert changes a matrix")
    gone = [m.name for m in facts.measures if m.merged_norm < COLLAPSED * _mean_norm(m)]
    burst = [m.name for m in facts.measures if m.merged_norm > EXPLODED * max(m.norms)]
    said = []
    if gone:
        said.append(f"below {COLLAPSED:g} times the mean expert's norm in {len(gone)} of {len(facts.measures)}")
    if burst:
        said.append(f"above {EXPLODED:g} times that of the largest expert in {len(burst)} of {len(facts.measures)}")
    if said:
        return finding(
            f"The merged delta is {' and '.join(said)} matrices. Look at the rank and the cut-off there, and at the "
            "scale; --set compute_dtype=float64 tells whether rounding is to blame",
            gone + burst,
        )
    return clear("no merged delta has collapsed or exploded")


def size_warning(merged: float, experts: Sequence[float], *, by_inputs: bool = False) -> tuple[str, str] | None:
    """Code and text of a problem with the size of a whole merge; None without a problem.

    The thresholds of AM402 and AM403, on norms over all merged tensors: every merge has them, also without a diagnosis.

    Args:
        merged: norm of the merged delta; `experts`: of each expert's.
        by_inputs: merged by statistics of the experts' inputs: also good merges are much larger then.

    >>> size_warning(0.9, [0.7, 0.7]) is None
    True
    >>> size_warning(20.0, [0.7, 0.7])
    ('AM403', 'the merged delta exploded')
    """
    if not any(experts):
        return None
    if merged > EXPLODED * max(experts):
        return "AM403", "the merged delta exploded"
    mean = math.hypot(*experts) / math.sqrt(len(experts))
    if merged < COLLAPSED * mean:
        return "AM403", (
            "the merged delta collapsed: it is near zero, and the output is almost the base. Raise --scale, or "
            "use another method (with iso_c on adapters, -o mean=rank)"
        )
    if merged > FAR * mean and not by_inputs:
        return "AM402", "the merged delta is much larger than the experts'"
    return None


def _truncated(facts: Facts) -> Outcome:
    rows = [r for r in facts.tensors if r.stats.get("error_norm") is not None and r.stats.get("norm")]
    if not rows:
        return not_applicable("no merged delta is written as factors")
    norm, lost = (math.hypot(*(r.stats[key] for r in rows)) for key in ("norm", "error_norm"))
    if (warning := truncation_warning(lost / norm)) is not None:
        return finding(
            f"{warning[1][0].upper()}{warning[1][1:]}",
            [r.name for r in rows if r.stats["error_norm"] > TRUNCATED * r.stats["norm"]],
        )
    return clear(f"the rank of the adapter costs a relative error of {lost / norm:.2g}")


def truncation_warning(error: float) -> tuple[str, str] | None:
    """Code and text if the rank of an adapter loses much of the merge; `error`: relative, over all modules.

    >>> truncation_warning(0.2) is None
    True
    """
    if error <= TRUNCATED:
        return None
    return "AM404", (
        f"the adapter's rank is too low for the merge: its relative error is {error:.2g}. Give a "
        "higher --rank, write a full model (--base, --to model), or use a method with a low-rank form"
    )


SIZE_CHECKS = (
    Check("AM401", "Merge of low-rank experts is about their sum", "issue", _plain_sum),
    Check("AM402", "Merged delta is much larger than the experts'", "tip", _far_out),
    Check("AM403", "Merged delta collapsed or exploded", "issue", _out_of_bounds),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue", _truncated),
)


SURPRISING = 3.0
"""Relative change of a table against the median matrix of the same expert."""


def _tables_move(facts: Facts) -> Outcome:
    tables = [r for r in facts.tensors if r.role == "embedding" and r.stats.get("base_norm")]
    medians = [facts.median_relative_norm(t) for t in range(len(facts.labels))]
    if not tables or not any(medians):
        return not_applicable("no table of vectors is merged together with matrices of a base")
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
    if said:
        return finding(
            f"Tables move more than the layers: {'; '.join(said[:3])}. New or re-initialized tokens do "
            "that, and the mean over experts dilutes them. Keep the base's table (--keep), or write a rule for it",
            names,
        )
    return clear("tables of vectors move no more than the layers")


def _untied_twins(facts: Facts) -> Outcome:
    rows = {r.name: r for r in facts.tensors}
    apart = [
        (a, b)
        for a, b in facts.twins
        if (rows[a].action, rows[a].method, rows[a].options) != (rows[b].action, rows[b].method, rows[b].options)
    ]
    if not facts.twins:
        return not_applicable("no two large tensors hold the same bytes in every checkpoint")
    if apart:
        pairs = "; ".join(f"{a} and {b}" for a, b in apart[:3])
        return finding(
            f"These hold the same bytes in the base and in every expert, but are merged in different ways and will "
            f"differ afterwards: {pairs}. If the model ties them, config.json should say so (tie_word_embeddings); "
            "else merge both by one method",
            [n for pair in apart for n in pair],
        )
    return clear("tensors that hold the same bytes everywhere are merged alike")


TABLE_CHECKS = (
    Check("AM501", "Embeddings move more than the layers", "tip", _tables_move),
    Check("AM502", "Equal tables are merged apart", "issue", _untied_twins),
)
