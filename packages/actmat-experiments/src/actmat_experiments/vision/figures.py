"""The figures of a vision suite: all methods side by side, accuracy by number of experts, RegMean by number of images,
estimates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from actmat_experiments.harness.figures import COLOURS, new_axes
from actmat_experiments.harness.report import TITLES, latest, show
from actmat_experiments.harness.results import REFERENCES, REGIMES, Regime, Score
from actmat_experiments.harness.table import Line, summarise
from actmat_experiments.suites import TableRequest
from actmat_experiments.vision.curves import curve_file, read_estimates

_COLOURS = {"full": COLOURS[0], "lora": COLOURS[1]}
_ACCURACY = "Test accuracy, mean over tasks"


def show_and_draw(request: TableRequest) -> None:
    """Print the tables of a suite and, if a folder is given, draw its figures."""
    for figure in draw(request, show(request)):
        if request.console is not None:
            request.console.print(f"drawn: {figure}", highlight=False)


def draw(request: TableRequest, scores: Sequence[Score]) -> list[Path]:
    """Draw what there are numbers for, as PNG, into `request.figures`.

    Returns:
        The files.
    """
    if request.figures is None:
        return []
    request.figures.mkdir(parents=True, exist_ok=True)
    drawn = []
    for model in dict.fromkeys(s.model for s in scores):
        name = "-".join(filter(None, [request.suite, model.replace("/", "-")]))
        lines = {}
        for regime in REGIMES:
            own, _ = latest(scores, model, regime)
            if own:
                lines[regime] = summarise(own, list(dict.fromkeys(s.task for s in own)))
        if lines:
            drawn.append(_bars(lines, request.figures / f"{name}-methods.png"))
        for regime, own_lines in lines.items():
            points = _points(curve_file(request.cache, request.suite), model, regime)
            sizes = [p for p in points if p["curve"] == "subsets"]
            samples = [p for p in points if p["curve"] == "samples"]
            if sizes:
                drawn.append(_by_number(sizes, regime, request.figures / f"{name}-{regime}-experts.png"))
            if samples:
                drawn.append(_by_samples(samples, own_lines, regime, request.figures / f"{name}-{regime}-samples.png"))
            if near := read_estimates(request.cache, request.suite, model, regime):
                drawn.append(request.figures / f"{name}-{regime}-estimates.png")
                near.figure().savefig(drawn[-1], dpi=150)
    return drawn


def _points(path: Path, model: str, regime: str) -> list[dict[str, Any]]:
    """The points of the settings that were run last; a later point replaces an equal one."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    own = [p for p in lines if (p["model"], p["regime"]) == (model, regime)]
    found = {}
    for point in own:
        if point["settings"] == own[-1]["settings"]:
            what = (point["curve"], point["method"], point["seed"], point.get("samples"), tuple(point["shares"]))
            found[what] = point
    return list(found.values())


def _bars(lines: Mapping[Regime, Sequence[Line]], path: Path) -> Path:
    """Bars per method at the default scale with intervals, a mark at the tuned one; base and experts as lines."""
    order = list(dict.fromkeys(r.method for rows in lines.values() for r in rows if r.method not in REFERENCES))
    figure, axes = new_axes(_ACCURACY, width=max(7.0, 0.42 * len(order) + 1.5))
    width = 0.8 / len(lines)
    for i, (regime, rows) in enumerate(lines.items()):
        default = {r.method: r for r in rows if r.scale == "default"}
        tuned = {r.method: r for r in rows if r.scale == "tuned"}
        at = [k for k, m in enumerate(order) if m in default]
        x = [k + (i - (len(lines) - 1) / 2) * width for k in at]
        own = [default[order[k]] for k in at]
        heights = [100 * r.average.value for r in own]
        halves = [100 * r.average.half for r in own]
        axes.bar(x, heights, width, yerr=halves, color=_COLOURS[regime], label=TITLES[regime], error_kw={"lw": 0.8})
        marks = [(a, 100 * tuned[order[k]].average.value) for a, k in zip(x, at, strict=True) if order[k] in tuned]
        label = "scale tuned on validation" if i == 0 else None
        axes.plot(*zip(*marks, strict=True), "k_", ms=7, mew=1.4, label=label) if marks else None
        if "experts" in default:
            value = 100 * default["experts"].average.value
            axes.axhline(value, color=_COLOURS[regime], ls="--", lw=1, label=f"experts, {TITLES[regime]}")
        if "base" in default and i == 0:  # one base for all regimes
            axes.axhline(100 * default["base"].average.value, color="black", ls=":", lw=1, label="base")
    axes.set_xticks(range(len(order)), order, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("test accuracy in %, mean over tasks")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=150)
    return path


def _by_number(points: Sequence[Mapping[str, Any]], regime: str, path: Path) -> Path:
    """Mean over subsets of accuracy / expert's accuracy against the number of merged experts, with the spread."""
    experts = {(p["seed"], *p["shares"]): p["shares"] for p in points if p["method"] == "experts"}
    figure, axes = new_axes(TITLES[regime], width=5.5, height=3.8)
    methods = [m for m in dict.fromkeys(p["method"] for p in points) if m != "experts"]
    for i, method in enumerate(methods):
        by_size: dict[int, list[float]] = {}
        for point in points:
            if point["method"] == method:
                own = experts[point["seed"], *point["shares"]]
                ratios = [share / own[task] for task, share in point["shares"].items()]
                by_size.setdefault(len(ratios), []).append(100 * sum(ratios) / len(ratios))
        sizes = sorted(by_size)
        means = [sum(by_size[n]) / len(by_size[n]) for n in sizes]
        style = {"color": "#777777", "ls": ":"} if method == "base" else {"color": f"C{i}", "marker": "o", "ms": 3}
        axes.plot(sizes, means, label=method, lw=1.5, **style)
    axes.set_xlabel("merged experts")
    axes.set_ylabel("% of the expert's accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    return path


def _by_samples(points: Sequence[Mapping[str, Any]], lines: Sequence[Line], regime: str, path: Path) -> Path:
    """RegMean against images per task; ACTMat, which needs none, is the line to reach."""
    by_samples: dict[int, list[float]] = {}
    for point in points:
        shares = point["shares"].values()
        by_samples.setdefault(point["samples"], []).append(100 * sum(shares) / len(shares))
    counts = sorted(by_samples)
    figure, axes = new_axes(TITLES[regime], width=5.5, height=3.8)
    means = [sum(by_samples[n]) / len(by_samples[n]) for n in counts]
    axes.plot(counts, means, "o-", ms=4, label="regmean", color=_COLOURS[regime])
    for name, style in (("actmat", "-"), ("average", ":")):
        for line in lines:
            if (line.method, line.scale) == (name, "default"):
                axes.axhline(100 * line.average.value, color="black", ls=style, lw=1, label=f"{name}, no data")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.05 * (high - low), high)  # a line at the very edge is hidden by the axis
    axes.set_xscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("training images per task that RegMean sees")
    axes.set_ylabel("test accuracy in %, mean over tasks")
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)
    return path
