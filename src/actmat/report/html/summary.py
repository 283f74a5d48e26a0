"""Section "Summary": the report in a few sentences and headline numbers."""

from __future__ import annotations

from collections import Counter

from actmat.diagnostics.model import Diagnosis
from actmat.errors import format_size
from actmat.report.html.elements import bullets, section, tiles
from actmat.report.html.markup import Markup
from actmat.report.html.scales import residual_text
from actmat.report.html.words import caveat, listed, plural

__all__ = ["summary"]

DONE = {
    "merge": "merged by the rule",
    "average": "averaged (mean of the deltas)",
    "copy": "copied from the base",
    "tie": "tied to another tensor",
}
"""Words for an action."""


def summary(diagnosis: Diagnosis) -> Markup:
    """Sentences and headline numbers."""
    totals = diagnosis.totals
    found = Counter(c.severity for c in diagnosis.checks if c.verdict == "found")
    entries = [
        (f"{len(diagnosis.experts)}", "experts" if len(diagnosis.experts) > 1 else "expert", ""),
        (f"{totals.tensors:,}", "tensors", ""),
        (_short(totals.parameters), "parameters", ""),
        (f"{totals.measured:,}", "matrices measured", ""),
        (f"{found['issue']}", "issue" if found["issue"] == 1 else "issues", "bad" if found["issue"] else "good"),
        (f"{found['tip']}", "tip" if found["tip"] == 1 else "tips", "tip" if found["tip"] else "good"),
    ]
    if totals.seconds is not None:
        entries.append((f"{totals.seconds:,.1f} s", "run time", ""))
    if totals.peak_bytes is not None:
        entries.append((format_size(totals.peak_bytes), "peak memory", ""))
    said = [*_merged(diagnosis), _residuals(diagnosis), _found(diagnosis)]
    return section("summary", "Summary", bullets(said), tiles(entries), caveat(role="note"))


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _merged(diagnosis: Diagnosis) -> list[str]:
    names = listed([e.name for e in diagnosis.experts])
    onto = f" of {diagnosis.base}" if diagnosis.base else ""
    verb = "would be" if diagnosis.source == "diagnose" else "were"
    actions = [f"{n:,} {DONE.get(a, a)}" for a, n in Counter(t.action for t in diagnosis.tensors).most_common()]
    said = [
        f"{plural(len(diagnosis.experts), 'expert')}{onto} ({names}) {verb} merged with {diagnosis.method}.",
        f"{plural(len(diagnosis.tensors), 'tensor')}: {', '.join(actions)}.",
    ]
    if unchanged := sum(t.unchanged for t in diagnosis.tensors):
        said.append(f"{plural(unchanged, 'tensor')} kept the base's bits, because no expert changed them.")
    return said


def _residuals(diagnosis: Diagnosis) -> str:
    if not diagnosis.measures:
        return "No matrix was measured, so this report says nothing about how the experts interfere."
    ranked = sorted(diagnosis.experts_summary, key=lambda e: e.residual)
    best, worst = ranked[0], ranked[-1]
    many = plural(len(diagnosis.measures), "measured matrix", "measured matrices")
    if len(ranked) == 1 or best.residual == worst.residual:
        return f"Over {many}, the residual is ρ = {residual_text(best.residual)} (0: as the expert, 1: as the base)."
    return (
        f"Over {many}, {best.name} is met best (ρ = {residual_text(best.residual)}) and {worst.name} least "
        f"(ρ = {residual_text(worst.residual)}); 0 is as the expert, 1 as the base."
    )


def _found(diagnosis: Diagnosis) -> str:
    found = Counter(c.severity for c in diagnosis.checks if c.verdict == "found")
    if found:
        return f"The checks found {listed([plural(found[s], s) for s in ('issue', 'tip') if found[s]])}."
    return f"None of {plural(len(diagnosis.checks), 'check')} found anything." if diagnosis.checks else "No checks ran."
