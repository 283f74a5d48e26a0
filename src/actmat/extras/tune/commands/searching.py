"""A search for a merge on the terminal: its memory plan, the best candidate so far, and the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmat.extras.tune.report import TuneReport
    from actmat.extras.tune.settings import TuneProgress
    from actmat.recipe import Recipe
    from actmat.run import MergeReport
    from actmat.settings import RunSettings


BETWEEN_LINES = 15.0
"""Seconds between lines about the search where no bar is seen."""


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
        began = said = time.monotonic()
        tried = 0

        class Shown(TuneProgress):
            def doing(self, what: str) -> None:
                bar.update(task, description=escape(what)[:70])
                self._line(what)

            def planned(self, plan: MemoryPlan) -> None:
                if not quiet:
                    say("\n".join(plan.lines()))

            def note(self, text: str) -> None:
                if not quiet:
                    say(f"note: {text}")

            def trial(self, found: Trial, best: Trial) -> None:
                nonlocal tried, said
                bar.update(task, description=f"best so far: {escape(best.candidate)} ({best.mean:.4g})"[:70])
                tried += 1
                if time.monotonic() - said >= BETWEEN_LINES:
                    self._line(f"{tried} tried; best so far: {best.candidate} ({best.mean:.4g})")

            def _line(self, text: str) -> None:
                """A line with the time since the start, where no bar is seen."""
                nonlocal said
                if not quiet and bar.disable:
                    said = time.monotonic()
                    say(f"{said - began:.0f} s: {text}")

        yield Shown()


def print_search(report: TuneReport) -> None:
    """The chosen merge, the final comparison, and the folder of the rest."""
    from actmat.cli.screen import console, escape, plain_table

    console.print(f"[bold]{escape(report.out)}[/bold]: {escape(report.chosen.candidate)}")
    measured = report.score if report.compared == report.score else f"{report.compared} (chosen by {report.score})"
    console.print(f"{len(report.trials)} trials; {escape(measured)} on inputs that the search did not see:\n")
    table = plain_table("merge", "mean", "worst", "difference to chosen", numbers=["mean", "worst"])
    for rival in report.finals:
        interval = "" if rival.low is None else f"{rival.low:+.3g} to {rival.high:+.3g}, {rival.verdict}"
        table.add_row(escape(rival.name), f"{rival.mean:.4g}", f"{max(rival.losses.values()):.4g}", interval)
    console.print(table)
    console.print("difference: 95 % interval, over inputs, of the mean minus that of the chosen merge")
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    for reason in report.refused.values():
        console.print(f"left out: {escape(reason)}")
    console.print(f"\n{escape(report.out)}.tune: recipe.yaml, tune.json, tune.html")


def tune_scales(recipes: Sequence[Recipe], data: Sequence[str], run: RunSettings, *, quiet: bool) -> list[MergeReport]:
    """Merge each recipe at the scale that unlabelled inputs choose (`actmat merge --tune-scale`), and print summaries.

    Args:
        data: values of the flag: NAME=DATA, or one data set for all experts.
    """
    from actmat.cli.streams import optional_stdout
    from actmat.cli.summary import print_summary
    from actmat.extras.collect.commands.agreement import pairs_of
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.tuning import scale_space, tune_recipe, usual_inputs
    from actmat.run.automatic import named

    places = pairs_of(data, "--tune-scale")
    reports = []
    with showing_search(quiet=quiet) as progress:
        for recipe in map(named, recipes):
            inputs = usual_inputs(recipe, places)
            settings = TuneSettings(average=False)
            reports.append(tune_recipe(recipe, scale_space(recipe), inputs, settings, run, progress))
    if not quiet:
        with optional_stdout("The merge is complete."):
            for report in reports:
                print_summary(report.merged)
                print_search(report)
    return [report.merged for report in reports]
