"""Sections of verdicts: the summary, the experts, and the checks with findings first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actmat.diagnostics.model import AgreementRow, CheckResult, DataResidual, Diagnosis, ExpertSummary
from actmat.errors import format_size
from actmat.report.html.elements import (
    Child,
    Markup,
    bullets,
    caveat,
    columns_table,
    el,
    join,
    listed,
    plural,
    section,
    stacked_table,
    tensor_link,
    tiles,
)
from actmat.report.html.figures import expert_class, line_legend, plot
from actmat.report.html.scales import number, percent, residual_level, residual_text

__all__ = ["checks", "experts", "summary"]

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


_RHO = (
    (0.1, "met", "misses it by less than a tenth of what the base does"),
    (0.5, "mostly met", "misses it by less than half of what the base does"),
    (1.0, "partly met", "misses it by more than half of what the base does"),
    (float("inf"), "not met", "no nearer to it than the base is"),
)

WORST = 3
"""Matrices listed per expert."""

BAR_END = 1.5
"""Residual at the end of its bar."""


def rho_words(residual: float) -> tuple[str, str]:
    """Verdict in one or two words, and its meaning for the merged weights. The base itself has residual 1."""
    return next((word, meaning) for bound, word, meaning in _RHO if residual < bound)


def experts(diagnosis: Diagnosis) -> Markup:
    """The table of verdicts, then tables of measurements on data."""
    head = ["expert", "share of all change", "residual ρ", "verdict", "change over rounding", "met least in"]
    rows = [_expert(diagnosis, t, s) for t, s in enumerate(diagnosis.experts_summary)]
    return section(
        "experts",
        "Experts",
        stacked_table(head, rows, caption="How near the merged weights are to each expert"),
        _answers(diagnosis.agreement) if diagnosis.agreement is not None else None,
        _on_data(diagnosis.residual_on_data) if diagnosis.residual_on_data is not None else None,
        lead="How near the merged weights come to each expert, on the input directions that this expert changed: "
        "ρ = 0 is as the expert itself, ρ = 1 as the base. Each matrix counts by the square of its change.",
    )


def _expert(diagnosis: Diagnosis, t: int, row: ExpertSummary) -> list[Child]:
    expert = diagnosis.experts[t]
    snr = [m.snr[t] for m in diagnosis.measures if m.snr is not None and m.norms[t]]
    weight = (
        ", weight by tensor" if expert.weight is None else f", weight {expert.weight:g}" if expert.weight != 1 else ""
    )
    title = [line_legend([(expert_class(t), "")]), el("b", row.name)]
    word, meaning = rho_words(row.residual)
    if not any(m.norms[t] for m in diagnosis.measures):
        word, meaning = "no change", "no measured matrix differs from the base"
    worst = (
        el("li", f"{residual_text(w.residual)} ", tensor_link(w.name, _label(w.name, w.part)))
        for w in row.worst[:WORST]
    )
    return [
        join([*title, el("small", f"{expert.location} ({expert.kind}{weight})")]),
        _bar(row.energy_share, percent(row.energy_share), "share"),
        _bar(row.residual / BAR_END, residual_text(row.residual), residual_level(row.residual), mark=1 / BAR_END),
        join([el("b", word), el("small", meaning)]),
        f"{number(min(snr))} to {number(max(snr))}" if snr else "–",
        el("ul", *worst) if row.worst else "–",
    ]


def _label(name: str, part: str) -> str:
    short = name.removesuffix(".weight")
    return f"{short}[{part}]" if part else short


def _bar(share: float, text: str, colour: str, mark: float | None = None) -> Markup:
    """A number with a bar below it; `mark` is a line across."""
    shapes = [
        el("rect", width=100, height=8, class_="track"),
        el("rect", width=f"{100 * min(1.0, share):.2f}", height=8, class_=f"bar {colour}"),
        el("path", d=f"M{100 * mark:.2f} 0V8", class_="mark") if mark is not None else None,
    ]
    return el("div", el("span", text), plot(shapes, width=100, height=8, label="", class_="gauge"), class_="gauged")


def _answers(rows: Sequence[AgreementRow]) -> Markup:
    return columns_table(
        ["expert", "answers that differ", "KL in nats", "predictions", "data"],
        [[r.expert, percent(r.disagreement), number(r.divergence), f"{r.predictions:,}", r.data] for r in rows],
        caption="Answers on unlabelled inputs: predictions whose most probable class is another than the expert's, and "
        "the mean of KL(expert || merged). A measurement; it forecasts no accuracy.",
    )


def _on_data(rows: Sequence[DataResidual]) -> Markup:
    return columns_table(
        ["expert", "residual ρ on data", "matrices", "statistics"],
        [[r.expert, residual_text(r.residual), f"{r.matrices:,}", r.statistics] for r in rows],
        caption="ρ on the inputs that each expert's layers really saw: 0 is as the expert itself, 1 as the base.",
    )


_SIGNS = {"issue": "✕", "tip": "!", "clear": "✓", "not_applicable": "–", "muted": "–"}
UNFOLDED = 4
"""Tensors of a finding that are shown without a click."""


def checks(diagnosis: Diagnosis) -> Markup:
    """A card per finding; checks that found nothing are folded."""
    found = [c for c in diagnosis.checks if c.verdict == "found"]
    found.sort(key=lambda c: (c.severity != "issue", c.code))
    others = [c for c in diagnosis.checks if c.verdict != "found"]
    nothing = el("p", f"None of {plural(len(others), 'check')} found anything." if others else "No checks ran.")
    rest = el(
        "details",
        el("summary", f"{plural(len(others), 'check')} with nothing to report"),
        el("ul", *(_quiet(c) for c in others), class_="quiet"),
    )
    return section(
        "checks",
        "Checks",
        *([check_card(c) for c in found] if found else [nothing]),
        rest if others else None,
        lead="An issue should be looked at before the merged model is used; a tip may be worth a try.",
    )


def check_card(check: CheckResult) -> Markup:
    """A finding with its tensors."""
    items = [el("li", tensor_link(n)) for n in check.tensors]
    if (more := check.count - len(check.tensors)) > 0:
        items.append(el("li", f"and {more:,} more, in report.json"))
    shown = el("ul", *items, class_="places")
    if len(items) > UNFOLDED:
        shown = el("details", el("summary", plural(check.count, "tensor")), shown)
    head = el("h3", el("span", _SIGNS[check.severity], class_="sign", aria_hidden="true"), el("span", check.title))
    return el(
        "article",
        head,
        el("p", el("span", check.severity, class_="badge"), " ", el("code", check.code), " ", _docs(check.docs)),
        el("p", f"{check.message.rstrip('.')}."),
        shown if items else None,
        class_=f"check {check.severity}",
        id=f"check-{check.code}",
    )


def _quiet(check: CheckResult) -> Markup:
    sign = el("span", _SIGNS[check.verdict], class_="sign", aria_hidden="true")
    words = f"{check.title} ({check.verdict.replace('_', ' ')}). {check.message.rstrip('.')}."
    return el("li", sign, el("code", check.code), " ", words, class_=check.verdict)


def _docs(location: str) -> Markup:
    """A link if it is an address, else the page of the documentation that came with the package."""
    if location.startswith("https://"):
        return el("a", "what it means", href=location, rel="noreferrer")
    return el("span", f"what it means: {location}", class_="note")
