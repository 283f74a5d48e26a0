"""The suite `forecast` of `actmat experiment`: measure the models, judge the candidates, show what holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.forecast.correlation import Correlation
from actmat_experiments.forecast.models import FAMILIES, Family
from actmat_experiments.forecast.rows import Row
from actmat_experiments.forecast.study import measured, rows_of
from actmat_experiments.forecast.verdict import BAR, Candidate, judge
from actmat_experiments.harness.cache import Cache
from actmat_experiments.suites import RunRequest, TableRequest

__all__ = ["markdown", "run", "show", "verdict_lines"]

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


def show(request: TableRequest) -> None:
    """Judge all rows in the cache and print the tables.

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
    console = request.console or Console(quiet=True)
    found = judge(rows)
    if request.markdown:
        console.print(markdown(found), markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(_table(found))
    for line in verdict_lines(rows, found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if request.figures is not None:
        from actmat_experiments.forecast.figure import draw

        console.print(f"drawn: {draw(found, request.figures)}", markup=False, highlight=False)


def verdict_lines(rows: Sequence[Row], found: Sequence[Candidate]) -> list[str]:
    """How much was measured, and what holds."""
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
    regimes = list(found[0].regimes)
    head = ["number", *families, *(f"all {r}" for r in regimes)]
    lines = ["**All rows: Spearman of the number with the drop, 95 % interval over clusters.**", "", *_head(head)]
    for c in found:
        cells = [f"`{c.name}`", *map(str, (*c.families.values(), *c.regimes.values()))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "**Within: rules compared for one expert (left), experts of one merge compared (right).**", ""]
    lines += _head(["number", *families, *(f"experts, {f}" for f in families), "holds"])
    for c in found:
        right = [f"{x.value:+.2f}" for x in c.experts.values()]
        cells = [f"`{c.name}`", *map(str, c.rules.values()), *right, "yes" if c.holds else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _head(names: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]


def _table(found: Sequence[Candidate]) -> Table:
    """For a terminal: per question, the mean over families and the worst family."""
    table = Table(
        title="How well numbers forecast what an expert loses (Spearman)",
        caption="mean over families, worst family in brackets; rules: which merge is best for an expert;\n"
        "experts: which expert of a merge loses most; * above the bar in every family",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for name in ("", "all rows", "rules", "experts"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    kind = found[0].kind
    for c in found:
        if c.kind != kind:
            table.add_section()
            kind = c.kind
        table.add_row(f"{c.name}{' *' if c.holds else ''}", *map(_short, (c.families, c.rules, c.experts)))
    return table


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
