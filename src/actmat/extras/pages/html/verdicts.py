"""Sections of verdicts: the checks with findings first, and the experts."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.diagnostics.model import AgreementRow, CheckResult, DataResidual, Diagnosis, ExpertSummary
from actmat.extras.pages.html.elements import (
    Child,
    Markup,
    columns_table,
    dotted,
    el,
    join,
    section,
    stacked_table,
    tensor_link,
)
from actmat.extras.pages.html.explained import explanation
from actmat.extras.pages.html.figures import expert_class, gauge, line_legend
from actmat.extras.pages.html.scales import number, percent, residual_level, residual_text
from actmat.extras.pages.html.verdict import findings, off_where, rho_words, size_finding
from actmat.report.words import plural

__all__ = ["checks", "experts"]

WORST = 3
"""Matrices listed per expert."""

BAR_END = 1.5
"""Residual at the end of its bar."""


def experts(diagnosis: Diagnosis) -> Markup:
    """The table of verdicts, then tables of measurements on data."""
    head = ["expert", "share of all change", "residual ρ", "verdict", "change over rounding", "largest ρ in"]
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
    word, meaning = _verdict(diagnosis, row)
    if not any(m.norms[t] for m in diagnosis.measures):
        word, meaning = "no change", "no measured matrix differs from the base"
    worst = (
        el("li", f"{residual_text(w.residual)} ", tensor_link(w.name, _label(w.name, w.part)))
        for w in row.worst[:WORST]
    )
    return [
        join([*title, el("small", *dotted(expert.location), f" ({expert.kind}{weight})")]),
        gauge(row.energy_share, percent(row.energy_share), "share"),
        gauge(row.residual / BAR_END, residual_text(row.residual), residual_level(row.residual), mark=1 / BAR_END),
        join([el("b", word), el("small", meaning)]),
        f"{number(min(snr))} to {number(max(snr))}" if snr else "–",
        el("ul", *worst) if row.worst else "–",
    ]


def _verdict(diagnosis: Diagnosis, row: ExpertSummary) -> tuple[Child, Child]:
    """Verdict and its meaning; none of a good residual beside a merge whose size is wrong."""
    far = size_finding(diagnosis)
    if far is None:
        return rho_words(row.residual)
    link = el("a", el("code", far.code), href=f"#check-{far.code}")
    return join([f"size is off{off_where(diagnosis, far)}: ", link]), "ρ looks at this expert's own directions only"


def _label(name: str, part: str) -> str:
    short = name.removesuffix(".weight")
    return f"{short}[{part}]" if part else short


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
    found = findings(diagnosis)
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
        el("p", el("span", check.severity, class_=f"badge {check.severity}"), " ", el("code", check.code)),
        el("p", f"{check.message.rstrip('.')}."),
        shown if items else None,
        _meaning(check),
        class_=f"check {check.severity}",
        id=f"check-{check.code}",
    )


def _quiet(check: CheckResult) -> Markup:
    sign = el("span", _SIGNS[check.verdict], class_="sign", aria_hidden="true")
    words = f"{check.title} ({check.verdict.replace('_', ' ')}). {check.message.rstrip('.')}."
    return el("li", sign, el("code", check.code), " ", words, class_=check.verdict)


def _meaning(check: CheckResult) -> Markup | None:
    """The meaning of the check, in the page itself; a link only to an address that every reader can open."""
    text = explanation(check.code)
    link = (
        el("p", el("a", check.docs, href=check.docs, rel="noreferrer")) if check.docs.startswith("https://") else None
    )
    if text is None and link is None:
        return None
    return el("details", el("summary", "What it means"), text, link)
