"""Section "Experts": a verdict per expert, and measurements on data where there are any."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.diagnostics.model import AgreementRow, DataResidual, Diagnosis, ExpertSummary
from actmat.report.html.elements import columns_table, section, stacked_table, tensor_link
from actmat.report.html.figures import expert_class, line_legend, plot
from actmat.report.html.markup import Child, Markup, el, join
from actmat.report.html.scales import number, percent, residual_level, residual_text

__all__ = ["experts", "rho_words"]

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
    weight = f", weight {expert.weight:g}" if expert.weight != 1 else ""
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
