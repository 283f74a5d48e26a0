"""The first section: is the merge fit for use, how large is it, which expert fares worst, and what to try next."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from actmat.diagnostics.model import CheckResult, Diagnosis, ExpertSummary
from actmat.errors import format_size
from actmat.extras.pages.html.elements import Child, Markup, bullets, caveat, el, join, listed, section, tiles
from actmat.extras.pages.html.explained import next_step
from actmat.extras.pages.html.figures import Bar, bars
from actmat.extras.pages.html.scales import number, residual_sign, residual_text
from actmat.report.words import SIZE_CODES, plural

__all__ = ["off_where", "rho_words", "size_finding", "summary"]

DONE = {
    "merge": "merged by the rule",
    "average": "averaged (mean of the deltas)",
    "copy": "copied from the base",
    "tie": "tied to another tensor",
}
"""Words for an action."""

_RHO = (
    (0.1, "met", "misses it by less than a tenth of what the base does"),
    (0.5, "mostly met", "misses it by less than half of what the base does"),
    (1.0, "partly met", "misses it by more than half of what the base does"),
    (float("inf"), "not met", "no nearer to it than the base is"),
)


def rho_words(residual: float) -> tuple[str, str]:
    """Verdict in one or two words, and its meaning for the merged weights. The base itself has residual 1."""
    return next((word, meaning) for bound, word, meaning in _RHO if residual < bound)


def size_finding(diagnosis: Diagnosis) -> CheckResult | None:
    """The check that found the merge too large or too small, if one did."""
    return next((c for c in findings(diagnosis) if c.code in SIZE_CODES), None)


def off_where(diagnosis: Diagnosis, found: CheckResult) -> str:
    """` in 1 tensor`, where the size of few tensors is off and that of the whole merge is not; else empty."""
    measured = len({m.name for m in diagnosis.measures})
    is_whole = any(c.code == "AM402" for c in findings(diagnosis)) or found.count >= measured
    return "" if is_whole else f" in {plural(found.count, 'tensor')}"


def findings(diagnosis: Diagnosis) -> list[CheckResult]:
    """Checks that found something, issues first."""
    found = [c for c in diagnosis.checks if c.verdict == "found"]
    return sorted(found, key=lambda c: (c.severity != "issue", c.code))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Norms over all measured matrices; `mean`: root mean square of the experts'."""

    merged: float
    total: float
    mean: float
    average: float

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> _Sizes:
        rows = diagnosis.measures
        merged, total, average = (
            math.hypot(*(getattr(m, f) for m in rows)) for f in ("merged_norm", "sum_norm", "mean_norm")
        )
        squares = math.fsum(n * n for m in rows for n in m.norms)
        return cls(merged, total, math.sqrt(squares / len(diagnosis.experts)), average)


def summary(diagnosis: Diagnosis) -> Markup:
    """The verdict, with its reasons beside it; numbers of the run below."""
    found = findings(diagnosis)
    kind = "bad" if any(c.severity == "issue" for c in found) else "tip" if found else "good"
    sizes = _Sizes.of(diagnosis) if diagnosis.measures else None
    off = size_finding(diagnosis)
    far = off is not None and not off_where(diagnosis, off)
    reasons = [_size(sizes, kind=kind, far=far)] if sizes is not None else []
    lists = el("div", _worst(diagnosis), _checks(diagnosis, found), _next(found))
    return section(
        "summary",
        "Verdict",
        el("div", el("strong", _headline(diagnosis, found)), _size_words(sizes), class_=f"banner {kind}", role="note"),
        el("div", *reasons, lists, class_="pair"),
        el("h3", "What was done"),
        bullets(_merged(diagnosis)),
        tiles(_numbers(diagnosis)),
        caveat(role="note"),
    )


def _headline(diagnosis: Diagnosis, found: list[CheckResult]) -> str:
    issues = sum(c.severity == "issue" for c in found)
    if issues:
        return f"Look before you use it: the checks found {plural(issues, 'issue')}."
    if found:
        return f"No issue; the checks have {plural(len(found), 'tip')}."
    return "No check found anything." if diagnosis.checks else "No checks ran."


def _size_words(sizes: _Sizes | None) -> Child:
    """Size against the sum and against an expert, in words."""
    if sizes is None or not sizes.mean:
        return None
    of_sum = f"{number(sizes.merged / sizes.total)} times the experts' sum and " if sizes.total else ""
    return f" The merged change is {of_sum}{number(sizes.merged / sizes.mean)} times as long as a mean expert's."


def _size(sizes: _Sizes, *, kind: str, far: bool) -> Markup:
    """Bars of the merged change and of what it is to be held against."""
    rows = [
        ("merged", sizes.merged, "far" if far and kind == "bad" else "e0 solid"),
        ("sum of the experts", sizes.total, "share"),
        ("a mean expert", sizes.mean, "share"),
        ("their average", sizes.average, "share"),
    ]
    longest = max(v for _, v, _ in rows) or 1.0
    shown = [Bar(name, value / longest, number(value), style) for name, value, style in rows]
    note = el("p", "Norm ‖D‖ over all measured matrices.", class_="note")
    return el("div", el("h3", "Size of the change"), bars(shown), note)


def _worst(diagnosis: Diagnosis) -> Markup | None:
    """The expert that is met least."""
    if not diagnosis.measures:
        said = "No matrix was measured, so this report says nothing about how the experts interfere."
        return join([el("h3", "Experts"), el("p", said)])
    ranked = sorted(diagnosis.experts_summary, key=lambda e: e.residual)
    best, worst = ranked[0], ranked[-1]
    far = size_finding(diagnosis)
    if far is not None:
        meaning: list[Child] = [
            f"ρ says little here, because the size is off{off_where(diagnosis, far)} (",
            _code(far),
            ")",
        ]
    else:
        meaning = [f"the merged weights are {_nearness(worst)}"]
    rest = f"; best is {best.name} with {residual_text(best.residual)}" if len(ranked) > 1 else ""
    if len(ranked) > 1 and residual_text(best.residual) == residual_text(worst.residual):
        rest = "; the others fare alike" if len(ranked) > 2 else f"; {best.name} fares alike"
    what = "Worst expert" if len(ranked) > 1 else "The expert"
    text = join([el("b", worst.name), f", ρ {residual_sign(worst.residual)}: ", *meaning, rest, "."])
    return join(
        [el("h3", what), el("p", text), el("p", "ρ is 0 for the expert itself, 1 for the base.", class_="note")]
    )


def _nearness(expert: ExpertSummary) -> str:
    if expert.residual >= 1:
        return "no nearer to it than the base is"
    share = residual_text(expert.residual).replace("< ", "less than ")
    return f"{share} of the base's distance away from it"


def _code(check: CheckResult) -> Markup:
    return el("a", el("code", check.code), href=f"#check-{check.code}")


def _checks(diagnosis: Diagnosis, found: list[CheckResult]) -> Markup:
    items = [el("li", el("span", c.severity, class_=f"badge {c.severity}"), " ", _code(c), " ", c.title) for c in found]
    clear = sum(c.verdict == "clear" for c in diagnosis.checks)
    other = len(diagnosis.checks) - clear - len(found)
    rest = f"{clear} clear, {other} without a verdict" if other else f"{clear} clear"
    line = el("li", rest, class_="note") if diagnosis.checks else el("li", "none ran", class_="note")
    return join([el("h3", "Checks"), el("ul", *items, line, class_="findings")])


def _next(found: list[CheckResult]) -> Markup:
    steps = [el("li", *step) for c in found if (step := next_step(c.code)) is not None]
    tune, compare = el("code", "actmat tune"), el("code", "actmat compare")
    if not steps:
        steps = [el("li", "Evaluate it on your tasks: no number here can replace that.")]
    steps.append(el("li", tune, " searches methods and scales on unlabelled inputs; ", compare, " shows two merges."))
    return join([el("h3", "What to try next"), el("ul", *steps, class_="findings")])


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


def _numbers(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    totals = diagnosis.totals
    entries = [
        (f"{len(diagnosis.experts)}", "experts" if len(diagnosis.experts) > 1 else "expert", ""),
        (f"{totals.tensors:,}", "tensors", ""),
        (_short(totals.parameters), "parameters", ""),
        (f"{totals.measured:,}", "matrices measured", ""),
    ]
    if totals.seconds is not None:
        entries.append((f"{totals.seconds:,.1f} s", "run time", ""))
    if totals.peak_bytes is not None:
        entries.append((format_size(totals.peak_bytes), "peak memory", ""))
    return entries


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
