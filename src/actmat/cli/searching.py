"""Terminal output of a search: its memory plan, the best candidate so far, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from actmat.cli.data import pairs_of
from actmat.cli.screen import console, escape, plain_table, print_result, showing_progress
from actmat.cli.streams import optional_stdout

if TYPE_CHECKING:
    from pathlib import Path

    from actmat.cli.data import InputFlags
    from actmat.diagnostics.model import AgreementRow
    from actmat.extras.tune.report import TuneReport
    from actmat.extras.tune.sources import InputSettings
    from actmat.recipe import Recipe
    from actmat.run import MergeReport
    from actmat.settings import RunSettings


def print_search(report: TuneReport) -> None:
    """Print the chosen merge, the final comparison, and the folder with the other files."""
    console.print(f"[bold]{escape(report.out)}[/bold]: {escape(report.chosen.candidate)}")
    measured = report.score if report.compared == report.score else f"{report.compared} (chosen by {report.score})"
    console.print(f"{len(report.trials)} trials; {escape(measured)} on inputs that the search did not see:\n")
    table = plain_table("merge", "mean", "worst", "difference to chosen", numbers=["mean", "worst"])
    for rival in report.finals:
        interval = "" if rival.low is None else f"{rival.low:+.3g} to {rival.high:+.3g}, {rival.verdict}"
        table.add_row(escape(rival.name), f"{rival.mean:.4g}", f"{max(rival.losses.values()):.4g}", interval)
    console.print(table)
    console.print("difference: 95 % interval, over inputs, of the mean minus the chosen merge's mean")
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    for reason in report.refused.values():
        console.print(f"left out: {escape(reason)}")
    console.print(f"\n{escape(report.out)}.tune: recipe.yaml, tune.json, tune.html")


def tune_scales(recipes: Sequence[Recipe], asked: InputFlags, run: RunSettings, *, quiet: bool) -> list[MergeReport]:
    """Merge each recipe at the scale chosen from unlabeled inputs (`--set tune_scale=true`); print summaries."""
    from actmat.cli.summary import print_summary
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.space import scale_space
    from actmat.extras.tune.tuning import tune_recipe

    places, settings = pairs_of(asked.data or []), TuneSettings(average=False)
    with showing_progress(quiet=quiet, lines=True) as progress:
        reports = [tune_recipe(r, scale_space, places, settings, run, progress) for r in recipes]
    with optional_stdout("The merge is complete."):
        for report in () if quiet else reports:
            print_summary(report.merged)
            print_search(report)
    return [report.merged for report in reports]


def merge_by(asked: InputFlags, recipes: Sequence[Recipe], run: RunSettings, *, quiet: bool) -> list[MergeReport]:
    """Merge by inputs of the experts and compare answers."""
    from actmat.extras.tune.with_inputs import merge_with_inputs

    data, check, settings = _inputs(asked)
    with showing_progress(quiet=quiet, lines=True) as progress:
        return merge_with_inputs(recipes, data, check, settings, run, progress)


def plan_by(asked: InputFlags, recipe: Recipe, run: RunSettings, *, json: bool, quiet: bool) -> None:
    """Print what a merge by inputs would measure and hold."""
    from actmat.extras.tune.with_inputs import plan_inputs

    lines = plan_inputs(recipe, *_inputs(asked), run)
    if json:
        print_result("plan", {"plans": [], "inputs": [line.strip() for line in lines]})
    elif not quiet:
        console.print("\n".join(map(escape, lines)))


def _inputs(asked: InputFlags) -> tuple[Any, Any, InputSettings]:
    """Data sets of both flags by expert, or 'self' for all, and the settings."""
    from actmat.extras.collect.data import SELF

    data, check = (pairs_of(values or [], flag) for values, flag in ((asked.data, "--data"), (asked.check, "--check")))
    if any(isinstance(d, str) and d != SELF for d in (data, check)):
        raise typer.BadParameter("every expert needs inputs of its own task: give --data NAME=INPUTS once per expert")
    return data, check, asked.settings()


def compare_answers(
    merged: str | Path, asked: InputFlags, *, base: str | None = None, run: RunSettings, quiet: bool
) -> tuple[AgreementRow, ...]:
    """Compute `actmat.agreement` of a merged model and its experts; `base` of adapters defaults to the manifest's."""
    from actmat.extras.tune.kept import measure_agreement

    data, settings = pairs_of(asked.data or []), asked.settings()
    with showing_progress(quiet=quiet, lines=True) as progress:
        return measure_agreement(merged, data, settings, base=base, run=run, progress=progress)
