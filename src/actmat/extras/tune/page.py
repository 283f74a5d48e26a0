"""The page of a search: the choice and its certainty, every candidate as a point, scales, and all trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from actmat.extras.pages.html.charts import Drawn, Plot, curve, dots
from actmat.extras.pages.html.environment import render, write_document
from actmat.extras.pages.html.scales import number, range_axis
from actmat.extras.tune.evaluate import Trial
from actmat.extras.tune.report import TuneReport

FAR = 5.0
"""Times the median loss, beyond which a loss stands at the edge of a figure."""

MOST_CURVES = 8


def render_tune(report: TuneReport) -> str:
    """A search as one HTML page."""
    longest = max(max(r.mean, 0.0) for r in report.finals) or 1.0
    words = {"worse": "It beats", "not told apart": "It cannot be told apart from", "better": "It is beaten by"}
    rivals = {v: [r.name for r in report.finals[1:] if r.verdict == v] for v in words}
    return render(
        "tune.html",
        "actmat.extras.tune",
        r=report,
        kind="bad" if rivals["better"] else "tip" if rivals["not told apart"] else "good",
        against=[(start, rivals[v]) for v, start in words.items() if rivals[v]],
        bars=[
            (f.name if i else "chosen", f.mean / longest, number(f.mean), "share" if i else "merged solid")
            for i, f in enumerate(report.finals)
        ],
        candidates=_candidates(report),
        scales=_scales(report),
        trials=_trials(report),
    )


def write_tune(report: TuneReport, path: str | Path) -> Path:
    """Write the page to a file; errors as of `write_document`."""
    return write_document(render_tune(report), path)


def _candidates(report: TuneReport) -> Plot:
    """Mean against worst loss; points further down and to the left are better."""
    trials = report.trials
    x_axis, y_axis = (range_axis(_near(v)) for v in ([t.mean for t in trials], [t.worst for t in trials]))
    front, chosen = {t.candidate.key for t in report.front}, report.chosen.candidate.key
    paths = []
    for trial in sorted(trials, key=lambda t: (t.candidate.key == chosen, t.candidate.key in front)):  # last: on top
        key = trial.candidate.key
        style = "merged chosen" if key == chosen else "e0 mid" if key in front else "gray"
        tip = f"{trial.candidate}: mean {number(trial.mean)}, worst {number(trial.worst)}"
        point = (x_axis.position(trial.mean), y_axis.top(trial.worst))
        paths.append(Drawn(dots([point]), f"dot {style}", tip))
    return Plot(
        "worst loss against mean loss, one point per candidate",
        y_axis,
        [(x_axis.position(t), number(t)) for t in x_axis.ticks],
        f"to the right: mean {report.score}; upwards: of the worst expert",
        paths,
        names=[("merged thick", "chosen"), ("e0", "no other is better in both"), ("gray", "the rest")],
    )


def _near(values: Sequence[float]) -> list[float]:
    """Values without those that would press all others into a corner."""
    limit = FAR * median(values)
    return [v for v in values if v <= limit] or list(values)


def _scales(report: TuneReport) -> dict[str, Any]:
    """Mean loss over the scale, one curve per merge."""
    curves: dict[str, dict[float, Trial]] = {}
    for trial in report.trials:
        curves.setdefault(str(trial.candidate.merge), {})[trial.candidate.scale] = trial
    best = sorted(curves, key=lambda name: min(t.mean for t in curves[name].values()))[:MOST_CURVES]
    x_axis = range_axis(sorted({s for name in best for s in curves[name]}))
    y_axis = range_axis(_near([t.mean for name in best for t in curves[name].values()]))
    paths, rows = [], []
    for n, name in enumerate(best):
        points_of = sorted(curves[name].items())
        drawn = [(x_axis.position(s), y_axis.top(t.mean)) for s, t in points_of]
        paths += [Drawn(curve(drawn), f"line e{n}", name), Drawn(dots(drawn), f"dot e{n}", name)]
        rows += [[name, number(s), number(t.mean)] for s, t in points_of]
    plot = Plot(
        "mean loss over the scale, one curve per method",
        y_axis,
        [(x_axis.position(t), number(t)) for t in x_axis.ticks],
        "scale",
        paths,
        names=[(f"e{n}", name) for n, name in enumerate(best)],
    )
    return {"plot": plot, "table": rows}


def _trials(report: TuneReport) -> list[list[str]]:
    """All trials, the best first."""
    ordered = sorted(report.trials, key=lambda t: t.mean)
    return [[str(t.candidate), number(t.candidate.scale), number(t.mean), number(t.worst)] for t in ordered]
