"""Sections of verdicts: the summary, the checks with findings first, and the experts.

`checks.json` holds the sections of docs/checks.md, without links, for readers who have no documentation at hand;
`python -m docs.generate` writes it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from actmat.diagnostics.model import AgreementRow, CheckResult, DataResidual, Diagnosis, ExpertSummary
from actmat.errors import format_size
from actmat.extras.pages.html.charts import Bar, bars, expert_class, gauge, line_legend
from actmat.extras.pages.html.elements import (
    Child,
    Markup,
    bullets,
    caveat,
    columns_table,
    dotted,
    el,
    join,
    listed,
    section,
    stacked_table,
    tensor_link,
    tiles,
)
from actmat.extras.pages.html.scales import number, percent, residual_level, residual_sign, residual_text
from actmat.report.words import SIZE_CODES, plural

FILE = "checks.json"

_NEXT = {
    "AM101": "Merge experts that were saved in float32, or keep them as adapters: these deltas are mostly rounding.",
    "AM102": "Look for the fine-tuned weights: what was given as this expert is the base in another dtype.",
    "AM103": "Ask how this expert was saved: its delta looks compressed.",
    "AM104": "Merge the weights from before the quantisation.",
    "AM201": "Leave out the expert that equals the base, or give the right path.",
    "AM202": "Leave out one of the two equal experts, or give the right path.",
    "AM203": "Find the base that this expert was trained from; a merge across bases cannot work.",
    "AM204": "Try the checkpoint after the shared training stage as the base.",
    "AM301": "Normalise the experts: `-m wudi`, or `-o normalise=norm`.",
    "AM302": "Normalise the experts, lower `rtol`, or take `-m actmat_ridge`.",
    "AM401": "Try `--scale 0.3` to `0.5`, a cap (in a recipe, `postprocess: {norm_cap: average}`), or `-m average`.",
    "AM402": "Try a lower `--scale`, a cap (in a recipe, `postprocess: {norm_cap: average}`), or `-m actmat_bounded`.",
    "AM403": "Look at rank and cut-off of the tensors below; try `--compute-dtype float64`, or another scale.",
    "AM404": "Give a higher `--rank`, or write a full model (`--to model`).",
    "AM501": "Look at new tokens; `--keep '*embed*'` leaves the table as it is in the base.",
    "AM502": "Merge both tables by one rule, or tie them in config.json.",
}  # fmt: skip


@cache
def _sections() -> dict[str, str]:
    found: dict[str, str] = json.loads(files("actmat.extras.pages.html").joinpath(FILE).read_text(encoding="utf-8"))
    return found


def explanation(code: str) -> Markup | None:
    """The meaning of a check, as a paragraph; None for a code that this version does not know."""
    text = _sections().get(code)
    return None if text is None else el("p", *spelled(text))


def next_step(code: str) -> list[Child] | None:
    """The step to try after a finding, in a sentence; None where nothing has to be done."""
    text = _NEXT.get(code)
    return None if text is None else spelled(text)


def spelled(text: str) -> list[Child]:
    """Words, with what stands between backticks as code and between double stars as strong."""
    pieces = re.split(r"`([^`]*)`|\*\*([^*]*)\*\*", text)
    out: list[Child] = []
    for n in range(0, len(pieces), 3):
        code, strong = (*pieces[n + 1 : n + 3], None, None)[:2]
        out.append(pieces[n])
        out += [el("code", code)] if code is not None else [el("strong", strong)] if strong is not None else []
    return out


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
    kind = "bad" if any(c.severity == "issue" for c in found) else "tip" if found else "calm"
    sizes = _Sizes.of(diagnosis) if diagnosis.measures else None
    reasons = [_size(sizes)] if sizes is not None else []
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
    if not diagnosis.checks:
        return "No checks ran."
    return "No check found a fault in the weights. Whether the model answers well was not checked: evaluate it."


def _size_words(sizes: _Sizes | None) -> Child:
    """Size against the sum and against an expert, in words."""
    if sizes is None or not sizes.mean:
        return None
    of_sum = f"{number(sizes.merged / sizes.total)} times the experts' sum and " if sizes.total else ""
    return f" The merged change is {of_sum}{number(sizes.merged / sizes.mean)} times as long as a mean expert's."


def _size(sizes: _Sizes) -> Markup:
    """Bars of the merged change and of what it is to be held against."""
    rows = [
        ("merged", sizes.merged, "merged solid"),
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
    nothing = el("p", _nothing(others) if others else "No checks ran.")
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


def _nothing(checks: Sequence[CheckResult]) -> str:
    """A sentence on the checks that were made, and on those that were not, where nothing was found."""
    clear = sum(c.verdict == "clear" for c in checks)
    rest = len(checks) - clear
    other = f"; {plural(rest, 'check')} did not apply or {'was' if rest == 1 else 'were'} muted" if rest else ""
    return (
        f"{plural(clear, 'check')} found nothing{other}. They look at how the experts were saved, at how much they "
        "disagree, and at size and rank of the result; none looks at what the merged model answers."
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
