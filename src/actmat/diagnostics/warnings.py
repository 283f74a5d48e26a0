"""Findings that every merge makes, from the hashes, inner products and norms of its records."""

from __future__ import annotations

import math
from collections.abc import Mapping

from actmat.diagnostics.identity import identity_findings
from actmat.diagnostics.totals import Norms, Totals
from actmat.engine.record import Record
from actmat.errors import Note
from actmat.planning.model import MergePlan

FAR = 3.0
"""Norm of the merged delta against the mean expert's: farther from the base than anything that was trained."""

COLLAPSED, EXPLODED = 0.1, 10.0
"""Norm against the mean expert's; against the largest expert's."""

TRUNCATED = 0.3
"""Relative error of an adapter against its merge, due to its rank."""


def merge_findings(plan: MergePlan, records: Mapping[str, Record], totals: Totals) -> dict[str, str]:
    """Code of a check -> words, for everything that the records of a merge show."""
    findings = [
        *identity_findings(plan, records),
        size_finding(totals.norms, by_inputs=plan.by_inputs),
        truncation_finding(totals.relative_error),
    ]
    return dict(filter(None, findings))


def warnings_of(plan: MergePlan, records: Mapping[str, Record], totals: Totals) -> tuple[Note, ...]:
    """The findings as warnings, without muted codes."""
    findings = merge_findings(plan, records, totals)
    return tuple(Note("warning", code, words) for code, words in findings.items() if code not in plan.recipe.mute)


def size_finding(norms: Norms | None, *, by_inputs: bool = False) -> tuple[str, str] | None:
    """Code and text of a problem with the size of a whole merge; None without a problem.

    Args:
        norms: over all that was merged.
        by_inputs: merged by statistics of the experts' inputs: also good merges are much larger then.

    >>> size_finding(Norms(merged=20.0, total=1.0, experts=(1.0, 1.0)))[1]
    "the merged delta exploded: 20 times the largest expert's norm. Lower the scale"
    """
    if norms is None or not any(norms.experts):
        return None
    merged, experts = norms.merged, norms.experts
    if merged > EXPLODED * max(experts):
        return "AM403", (
            f"the merged delta exploded: {merged / max(experts):.3g} times the largest expert's norm. Lower the scale"
        )
    mean = math.hypot(*experts) / math.sqrt(len(experts))
    if merged < COLLAPSED * mean:
        return "AM403", (
            "the merged delta collapsed: it is near zero, and the output is almost the base. Raise --scale, or "
            "use another method (with iso_c on adapters, -o mean=rank)"
        )
    if merged > FAR * mean and not by_inputs:
        return "AM402", (
            f"the merged delta has {merged / mean:.3g} times the mean expert's norm: the model is moved farther than "
            "any expert was. Compare, on inputs of the tasks ('actmat tune', no labels needed), with a lower scale, or "
            "with the experts' mean norm (--set post=mean_norm)"
        )
    return None


def truncation_finding(error: float) -> tuple[str, str] | None:
    """Code and text if the rank of an adapter loses much of the merge; `error`: relative, over all modules.

    >>> truncation_finding(0.2) is None
    True
    """
    if error <= TRUNCATED:
        return None
    return "AM404", (
        f"the adapter holds too little of the merge: its relative error, with what is left out, is {error:.2g}. Give a "
        "higher --rank, write a full model (--base, --to model), or use a method with a low-rank form"
    )
