"""A search for a merge on the terminal: its memory plan, the best candidate so far, and the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmat.extras.tune.report import TuneReport
    from actmat.extras.tune.settings import TuneProgress
    from actmat.recipe import Recipe
    from actmat.settings import RunSettings

__all__ = ["merge_at_tuned_scales", "print_search", "showing_search"]


@contextlib.contextmanager
def showing_search(*, quiet: bool) -> Iterator[TuneProgress]:
    """Progress on stderr: the memory plan, notes, the stage, and the best candidate so far."""
    from rich.progress import TimeElapsedColumn

    from actmat.cli.screen import escape, progress_bar
    from actmat.cli.streams import say
    from actmat.extras.tune.evaluate import Trial
    from actmat.extras.tune.memory import MemoryPlan
    from actmat.extras.tune.settings import TuneProgress

    with progress_bar("{task.description}", TimeElapsedColumn(), quiet=quiet) as bar:
        task = bar.add_task("starting", total=None)

        class Shown(TuneProgress):
            def doing(self, what: str) -> None:
                bar.update(task, description=escape(what)[:70])

            def planned(self, plan: MemoryPlan) -> None:
                if not quiet:
                    say("\n".join(plan.lines()))

            def note(self, text: str) -> None:
                if not quiet:
                    say(f"note: {text}")

            def trial(self, found: Trial, best: Trial) -> None:
                bar.update(task, description=f"best so far: {escape(best.candidate)} ({best.mean:.4g})"[:70])

        yield Shown()


def print_search(report: TuneReport) -> None:
    """The chosen merge, the final comparison, and the folder of the rest."""
    from actmat.cli.screen import console, escape, plain_table

    console.print(f"[bold]{escape(report.out)}[/bold]: {escape(report.chosen.candidate)}")
    measured = report.score if report.compared == report.score else f"{report.compared} (chosen by {report.score})"
    console.print(f"{len(report.trials)} trials; {escape(measured)} on inputs that the search did not see:\n")
    table = plain_table("merge", "mean", "worst", "more than chosen, 95 %", numbers=["mean", "worst"])
    for rival in report.finals:
        interval = "" if rival.low is None else f"{rival.low:+.3g} to {rival.high:+.3g}, {rival.verdict}"
        table.add_row(escape(rival.name), f"{rival.mean:.4g}", f"{max(rival.losses.values()):.4g}", interval)
    console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    for reason in report.refused.values():
        console.print(f"left out: {escape(reason)}")
    console.print(f"\n{escape(report.out)}.tune: recipe.yaml, tune.json, tune.html")


def merge_at_tuned_scales(
    recipes: list[Recipe], data: Mapping[str, str] | str, run: RunSettings, *, quiet: bool
) -> list[TuneReport]:
    """Merge each recipe at the scale that unlabelled inputs choose, with the settings that `actmat tune` has."""
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.tuning import scale_space, tune_recipe, usual_inputs

    reports = []
    with showing_search(quiet=quiet) as progress:
        for recipe in recipes:
            inputs = usual_inputs(recipe, data)
            settings = TuneSettings(average=False)
            reports.append(tune_recipe(recipe, scale_space(recipe), inputs, settings, run, progress))
    return reports
