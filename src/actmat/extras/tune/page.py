"""The page of a search: the choice and its certainty, every candidate as a point, scales, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from actmat.extras.pages.html.charts import Bar, bars, figure, frame, line_legend, numbers, plot, x_labels, y_labels
from actmat.extras.pages.html.elements import (
    Child,
    Markup,
    bullets,
    document,
    el,
    listed,
    section,
    stacked_table,
    tiles,
    write_document,
)
from actmat.extras.pages.html.scales import number, range_axis
from actmat.extras.pages.html.tensors import Column, big_table
from actmat.extras.tune.evaluate import Trial
from actmat.extras.tune.report import TuneReport
from actmat.version import __version__

FAR = 5.0
"""Times the median loss, beyond which a loss stands at the edge of a figure."""


def render_tune(report: TuneReport) -> str:
    """A search as one HTML page."""
    sections = [
        ("summary", "Verdict", _summary(report)),
        ("final", "Unseen inputs", _final(report)),
        ("candidates", "Candidates", _candidates(report)),
        ("scales", "Scales", _scales(report)),
        ("trials", "All trials", _trials(report)),
    ]
    made = f"Made by actmat {__version__}; the numbers are in tune.json."
    return document("Search for a merge", el("code", str(report.out)), sections, made=made)


def write_tune(report: TuneReport, path: str | Path) -> Path:
    """Write the page to a file; errors as of `write_document`."""
    return write_document(render_tune(report), path)


def _whole(report: TuneReport) -> list[Trial]:
    return [t for t in report.trials if t.share == 1.0]


def _summary(report: TuneReport) -> Markup:
    """The chosen merge against the others on unseen inputs, before all else."""
    rivals = report.finals[1:]
    verdicts = {v: [r.name for r in rivals if r.verdict == v] for v in ("worse", "not told apart", "better")}
    words = (
        ("worse", "It beats"), ("not told apart", "It cannot be told apart from"), ("better", "It is beaten by"),
    )  # fmt: skip
    against = [f"{start} {listed(verdicts[v])}." for v, start in words if verdicts[v]]
    kind = "bad" if verdicts["better"] else "tip" if verdicts["not told apart"] else "good"
    longest = max(max(r.mean, 0.0) for r in report.finals) or 1.0
    rows = [
        Bar(r.name if i else "chosen", r.mean / longest, number(r.mean), "share" if i else "e0 solid")
        for i, r in enumerate(report.finals)
    ]
    measured = f"Mean {report.compared} on inputs that the search did not see; shorter is better."
    entries = [
        (number(report.chosen.mean), f"mean {report.score} in the search", ""),
        (number(report.chosen.worst), "of the worst expert", ""),
        (f"{len(report.trials):,}", "trials", ""),
        (f"{report.seconds:,.0f} s", "in all", ""),
    ]
    said = [*report.notes, *(f"Left out: {reason}" for reason in report.refused.values())]
    return section(
        "summary",
        "Verdict",
        el("div", el("strong", f"Chosen: {report.chosen.candidate}."), " ", " ".join(against), class_=f"banner {kind}"),
        el("h3", "Against the others"),
        bars(rows),
        el("p", measured, class_="note"),
        bullets(said) if said else None,
        tiles(entries),
    )


def _final(report: TuneReport) -> Markup:
    labels = list(report.finals[0].losses)
    rows = [
        [r.name, number(r.mean), "–" if r.low is None else f"{number(r.low)} to {number(r.high)}", r.verdict]
        + [number(r.losses[label]) for label in labels]
        for r in report.finals
    ]
    head = ["merge", "mean", "difference to chosen, 95 % interval", "verdict", *labels]
    lead = (
        f"The {report.compared}, of all experts and of each, on inputs that the search did not see. Intervals: "
        "bootstrap over the inputs of each expert."
    )
    table = stacked_table(head, rows, caption="Losses on unseen inputs")
    return section("final", "On unseen inputs", table, lead=lead)


def _candidates(report: TuneReport) -> Markup:
    """Mean against worst loss; points further down and to the left are better."""
    trials = _whole(report)
    x_axis, y_axis = (range_axis(_near(v)) for v in ([t.mean for t in trials], [t.worst for t in trials]))
    front = {t.candidate.key for t in report.front}
    shapes: list[Child] = [el("path", d=f"M0 {y_axis.top(t):.4f}H1", class_="grid") for t in y_axis.ticks]
    chosen = report.chosen.candidate.key
    for trial in sorted(trials, key=lambda t: (t.candidate.key == chosen, t.candidate.key in front)):  # last: on top
        x, y = x_axis.position(trial.mean), y_axis.top(trial.worst)
        style = "e0 chosen" if trial.candidate.key == chosen else "e1 mid" if trial.candidate.key in front else "e7"
        tip = f"{trial.candidate}: mean {number(trial.mean)}, worst {number(trial.worst)}"
        shapes.append(el("path", d=f"M{x:.4f} {y:.4f}h0", class_=f"dot {style}", data_tip=tip))
    area = plot(shapes, width=1, height=1, label="worst loss against mean loss, one point per candidate")
    left = y_labels(y_axis, [number(t) for t in y_axis.ticks])
    below = x_labels([(x_axis.position(t), number(t)) for t in x_axis.ticks])
    drawn = frame(area, left, below, x_title=f"to the right: mean {report.score}; upwards: of the worst expert")
    names = [("e0 thick", "chosen"), ("e1", "no other is better in both"), ("e7", "the rest")]
    note = "Lower left is better. All inputs of the search; losses far above the rest stand at the edge."
    return section("candidates", "Candidates", figure("Mean against worst", line_legend(names), drawn, note=note))


def _near(values: Sequence[float]) -> list[float]:
    """Values without those that would press all others into a corner."""
    limit = FAR * median(values)
    return [v for v in values if v <= limit] or list(values)


def _scales(report: TuneReport) -> Markup:
    """Mean loss over the scale, one curve per merge, from the trials on most inputs at each scale."""
    curves: dict[str, dict[float, Trial]] = {}
    for trial in report.trials:
        if not trial.candidate.groups:
            points = curves.setdefault(str(trial.candidate.merge), {})
            if trial.candidate.scale not in points or trial.share >= points[trial.candidate.scale].share:
                points[trial.candidate.scale] = trial
    best = sorted(curves, key=lambda name: min(t.mean for t in curves[name].values()))
    values = [t.mean for name in best[:8] for t in curves[name].values()]
    scales = sorted({s for name in best[:8] for s in curves[name]})
    x_axis, y_axis = range_axis(scales), range_axis(_near(values))
    shapes: list[Child] = [el("path", d=f"M0 {y_axis.top(t):.4f}H1", class_="grid") for t in y_axis.ticks]
    rows = []
    for n, name in enumerate(best[:8]):
        drawn_at = [(x_axis.position(s), y_axis.top(t.mean)) for s, t in sorted(curves[name].items())]
        path = "".join(f"{'L' if i else 'M'}{x:.4f} {y:.4f}" for i, (x, y) in enumerate(drawn_at))
        shapes.append(el("path", d=path, class_=f"line e{n}", data_tip=name))
        dots = "".join(f"M{x:.4f} {y:.4f}h0" for x, y in drawn_at)
        shapes.append(el("path", d=dots, class_=f"dot e{n}", data_tip=name))
        rows += [[name, number(s), number(t.mean), f"{t.share:.0%}"] for s, t in sorted(curves[name].items())]
    area = plot(shapes, width=1, height=1, label="mean loss over the scale, one curve per method")
    left = y_labels(y_axis, [number(t) for t in y_axis.ticks])
    below = x_labels([(x_axis.position(t), number(t)) for t in x_axis.ticks])
    legend = line_legend((f"e{n}", name) for n, name in enumerate(best[:8]))
    table = numbers(["merge", "scale", report.score, "inputs"], rows, caption="Scale curves")
    drawn = frame(area, left, below, x_title="scale")
    note = "The best merge first, at most eight. Points of early rounds are on a share of the inputs."
    return section("scales", "Scales", figure("Loss over the scale", legend, drawn, table, note=note))


def _trials(report: TuneReport) -> Markup:
    ordered = sorted(report.trials, key=lambda t: (-t.share, t.mean))
    columns = [
        Column("candidate", "name", [str(t.candidate) for t in ordered]),
        Column("method", "choice", [t.candidate.merge.method for t in ordered]),
        Column("scale", "number", [t.candidate.scale for t in ordered]),
        Column("inputs", "choice", [f"{t.share:.0%}" for t in ordered]),
        Column("mean", "number", [t.mean for t in ordered]),
        Column("worst", "number", [t.worst for t in ordered]),
    ]
    return section("trials", "All trials", big_table(columns, caption="All trials"))
