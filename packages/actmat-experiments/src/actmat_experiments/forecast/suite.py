"""The suite `forecast` of `actmat experiment`: measure the models, judge the candidates, show and draw what holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.forecast.models import FAMILIES, Family
from actmat_experiments.forecast.rows import Row, measured, rows_of
from actmat_experiments.forecast.verdict import BAR, Candidate, Correlation, judge
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.table import markdown as write_markdown
from actmat_experiments.harness.table import new_table
from actmat_experiments.suites import RunRequest, TableRequest


def draw(found: Sequence[Candidate], folder: Path) -> Path:
    """Write `forecast.png` into the folder: a dot with its interval per number and family."""
    from actmat_experiments.harness.figures import new_axes

    families = list(found[0].families)
    figure, axes = new_axes("Numbers that might forecast the drop", width=7.5, height=0.32 * len(found) + 1.4)
    for k, family in enumerate(families):
        own = [c.families[family] for c in found]
        height = [len(found) - row + 0.3 - 0.6 * k / max(len(families) - 1, 1) for row in range(len(found))]
        spread = [[c.value - c.low for c in own], [c.high - c.value for c in own]]
        clipped = [[max(v, 0.0) for v in side] for side in spread]
        axes.errorbar([c.value for c in own], height, xerr=clipped, fmt="o", ms=3, lw=0.8, label=family)
    axes.axvline(0, color="black", lw=0.8)
    axes.axvline(BAR, color="black", lw=0.8, ls=":")
    axes.set_yticks([len(found) - row for row in range(len(found))], [c.name for c in found], fontsize=8)
    axes.set_xlim(-1, 1)
    axes.set_ylim(0.3, len(found) + 0.7)
    axes.set_xlabel("Spearman with the measured drop, 95 % interval; dotted: the bar")
    axes.legend(fontsize=7, ncols=min(len(families), 6), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "forecast.png"
    figure.savefig(path, dpi=130)
    return path


_SEEDS = range(64)
"""Seeds that `table` looks for in the cache."""


def run(request: RunRequest) -> None:
    """Train and measure the models of the request; `models` are names of families.

    Raises:
        RecipeError: no such family, or something is asked for that this suite does not choose.
    """
    asked = {"--tasks": request.tasks, "--methods": request.methods, "--data": request.data, "--set": request.settings}
    if problems := [f"{flag} means nothing here" for flag, value in asked.items() if value]:
        raise RecipeError("The suite forecast trains on the digits of the demo, with all rules.", problems)
    console = request.console or Console(quiet=True)
    chosen = _chosen(request.models)
    request.cache.mkdir(parents=True, exist_ok=True)
    total, number = len(chosen) * len(request.seeds), iter(range(1, 1 << 30))
    rows_of(
        Cache(request.cache),
        chosen,
        request.seeds,
        progress=lambda name: console.print(f"model {next(number)} of {total}: {name}", highlight=False),
    )


def _measured_rows(request: TableRequest) -> list[Row]:
    """All rows in the cache.

    Raises:
        RecipeError: nothing was measured, or one family alone.
    """
    models = measured(Cache(request.cache), FAMILIES, _SEEDS)
    rows = [row for found in models.values() for row in found]
    if len({row.family for row in rows}) < 2:
        raise RecipeError(
            f"{request.cache} holds rows of fewer than two families, and what is fitted on one is tried on another; "
            "run first: actmat experiment run forecast"
        )
    return rows


def data(request: TableRequest) -> dict[str, Any]:
    """Every number and how it goes with the drop; errors as in `table`."""
    rows = _measured_rows(request)
    found = judge(rows)
    return {
        "rows": len(rows),
        "candidates": [{**asdict(c), "worst": c.worst, "holds": c.holds} for c in found],
        "verdict": verdict_lines(rows, found),
    }


def table(request: TableRequest) -> None:
    """Judge all rows in the cache and print the tables.

    Raises:
        RecipeError: nothing was measured, or one family alone.
    """
    rows = _measured_rows(request)
    console = request.console or Console(quiet=True)
    found = judge(rows)
    if request.markdown:
        console.print(markdown(found), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(_terminal_table(found))
    for line in verdict_lines(rows, found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if request.figures is not None:
        from actmat_experiments.forecast.suite import draw

        console.print(f"drawn: {draw(found, request.figures)}", markup=False, highlight=False)


def verdict_lines(rows: Sequence[Row], found: Sequence[Candidate]) -> list[str]:
    """Lines on the number of measurements, and on the candidates that hold."""
    models = {r.model for r in rows}
    merges = {(r.model, r.method, r.scale, r.experts) for r in rows}
    clusters = {(r.model, r.task) for r in rows}
    held = {
        kind: [c.name for c in found if c.holds and c.kind == kind] for kind in dict.fromkeys(c.kind for c in found)
    }
    lines = [
        f"{len(rows)} rows: {len(merges)} merges of {len(models)} models; intervals over {len(clusters)} clusters "
        "(expert x model)"
    ]
    lines += [
        f"{kind}: {', '.join(names) or 'nothing'} above {BAR} in every family, over all rows and between rules"
        for kind, names in held.items()
    ]
    return lines


def markdown(found: Sequence[Candidate]) -> str:
    """Two tables: over all rows, per family with intervals; and the other two questions, mean over families."""
    families = list(found[0].families)
    head = ["number", *families, *(f"all {r}" for r in found[0].regimes)]
    pooled = [[f"`{c.name}`", *map(str, (*c.families.values(), *c.regimes.values()))] for c in found]
    inside = ["number", *families, *(f"experts, {f}" for f in families), "holds"]
    rows = []
    for c in found:
        right = [f"{x.value:+.2f}" for x in c.experts.values()]
        rows.append([f"`{c.name}`", *map(str, c.rules.values()), *right, "yes" if c.holds else "no"])
    return (
        "**All rows: Spearman of the number with the drop, 95 % interval over clusters.**\n\n"
        f"{write_markdown(head, pooled, n_left=len(head))}\n"
        "**Within: rules compared for one expert (left), experts of one merge compared (right).**\n\n"
        f"{write_markdown(inside, rows, n_left=len(inside))}"
    ).rstrip("\n")


def _terminal_table(found: Sequence[Candidate]) -> Table:
    """For a terminal: per question, the mean over families and the worst family."""
    caption = (
        "mean over families, worst family in brackets; rules: which merge is best for an expert;\n"
        "experts: which expert of a merge loses most; * above the bar in every family"
    )
    title = "How well numbers forecast what an expert loses (Spearman)"
    made = new_table(title, caption, "", ("all rows", "rules", "experts"))
    kind = found[0].kind
    for c in found:
        if c.kind != kind:
            made.add_section()
            kind = c.kind
        made.add_row(f"{c.name}{' *' if c.holds else ''}", *map(_short, (c.families, c.rules, c.experts)))
    return made


def _short(values: Mapping[str, Correlation]) -> str:
    numbers = [c.value for c in values.values()]
    return f"{sum(numbers) / len(numbers):+.2f} ({min(numbers):+.2f})"


def _chosen(names: Sequence[str] | None) -> list[Family]:
    if names is None:
        return list(FAMILIES)
    known = {family.name: family for family in FAMILIES}
    problems = [f"there is no family '{n}'.{did_you_mean(n, list(known))}" for n in names if n not in known]
    if problems:
        raise RecipeError(f"The families of the suite forecast are {', '.join(known)}.", problems)
    return [known[name] for name in names]
