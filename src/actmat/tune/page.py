"""The page of a search: what was chosen and how sure that is, every candidate as a point, scales, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat.report.html.document import document, write_document
from actmat.report.html.elements import Child, Markup, bullets, columns_table, el, section, tiles
from actmat.report.html.figures import figure, frame, numbers, plot, x_labels, y_labels
from actmat.report.html.scales import Axis, number
from actmat.report.html.tensors import Column, big_table
from actmat.tune.evaluate import Trial
from actmat.tune.report import TuneReport
from actmat.version import __version__

__all__ = ["render_tune", "write_tune"]


def render_tune(report: TuneReport) -> str:
    """A search as one HTML page."""
    sections = [
        ("summary", "Summary", _summary(report)),
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
    said = [f"Chosen: {report.chosen.candidate}.", *report.notes]
    said += [f"Left out: {reason}" for reason in report.refused.values()]
    entries = [
        (number(report.chosen.mean), f"mean {report.score}", ""),
        (number(report.chosen.worst), "of the worst expert", ""),
        (f"{len(report.trials):,}", "trials", ""),
        (f"{report.seconds:,.0f} s", "in all", ""),
    ]
    return section("summary", "Summary", bullets(said), tiles(entries))


def _final(report: TuneReport) -> Markup:
    labels = list(report.finals[0].losses)
    rows = [
        [r.name, number(r.mean), "–" if r.low is None else f"{number(r.low)} to {number(r.high)}", r.verdict]
        + [number(r.losses[label]) for label in labels]
        for r in report.finals
    ]
    table = columns_table(["merge", "mean", "more than chosen, 95 %", "verdict", *labels], rows, caption="Losses")
    lead = (
        f"{report.compared} on inputs that the search did not see. Intervals: bootstrap over the inputs of each expert."
    )
    return section("final", "On unseen inputs", table, lead=lead)


def _candidates(report: TuneReport) -> Markup:
    """Mean against worst loss; points further down and to the left are better."""
    trials = _whole(report)
    x_axis, y_axis = _axis([t.mean for t in trials]), _axis([t.worst for t in trials])
    front = {t.candidate.key for t in report.front}
    shapes: list[Child] = [el("path", d=f"M0 {y_axis.top(t):.4f}H1", class_="grid") for t in y_axis.ticks]
    for trial in trials:
        x, y = x_axis.position(trial.mean), y_axis.top(trial.worst)
        style = "e0" if trial.candidate.key == report.chosen.candidate.key else "e1" if _on(trial, front) else "e7"
        tip = f"{trial.candidate}: mean {number(trial.mean)}, worst {number(trial.worst)}"
        shapes.append(el("path", d=f"M{x:.4f} {y:.4f}h0", class_=f"dot {style}", data_tip=tip))
    area = plot(shapes, width=1, height=1, label="worst loss against mean loss, one point per candidate")
    left = y_labels(y_axis, [number(t) for t in y_axis.ticks])
    below = x_labels([(x_axis.position(t), number(t)) for t in x_axis.ticks])
    drawn = frame(area, left, below, x_title=f"mean {report.score}; up: of the worst expert")
    note = "First colour: chosen. Second: no other candidate is better in both. Grey: the rest. All inputs."
    return section("candidates", "Candidates", figure("Mean against worst", drawn, note=note))


def _on(trial: Trial, front: set[str]) -> bool:
    return trial.candidate.key in front


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
    x_axis, y_axis = _axis(scales), _axis(values)
    shapes: list[Child] = [el("path", d=f"M0 {y_axis.top(t):.4f}H1", class_="grid") for t in y_axis.ticks]
    rows = []
    for n, name in enumerate(best[:8]):
        drawn_at = [(x_axis.position(s), y_axis.top(t.mean)) for s, t in sorted(curves[name].items())]
        path = "".join(f"{'L' if i else 'M'}{x:.4f} {y:.4f}" for i, (x, y) in enumerate(drawn_at))
        shapes.append(el("path", d=path, class_=f"line e{n}", data_tip=name))
        rows += [[name, number(s), number(t.mean), f"{t.share:.0%}"] for s, t in sorted(curves[name].items())]
    area = plot(shapes, width=1, height=1, label="mean loss over the scale, one curve per method")
    left = y_labels(y_axis, [number(t) for t in y_axis.ticks])
    below = x_labels([(x_axis.position(t), number(t)) for t in x_axis.ticks])
    legend = el("ul", *(el("li", _key(n), name) for n, name in enumerate(best[:8])), class_="legend")
    table = numbers(["merge", "scale", report.score, "inputs"], rows, caption="Scale curves")
    drawn = frame(area, left, below, x_title="scale")
    note = "The eight best merges. Points of early rounds are on a share of the inputs."
    return section("scales", "Scales", figure("Loss over the scale", drawn, legend, table, note=note))


def _key(n: int) -> Markup:
    return el("svg", el("path", d="M0 5H26", class_=f"line e{n}"), class_="key", viewBox="0 0 26 10")


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


def _axis(values: Sequence[float]) -> Axis:
    """An axis over the values with four ticks; the largest tenth of very spread values is cut at its edge."""
    low, high = min(values), sorted(values)[max(0, int(0.9 * len(values)) - 1)]
    high = high if high > low else low + max(abs(low), 1e-9)
    return Axis(low, high, tuple(low + (high - low) * k / 4 for k in range(5)))
