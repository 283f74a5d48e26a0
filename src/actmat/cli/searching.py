"""Terminal output of a search: its memory plan, the best candidate so far, and the result."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from actmat.cli.data import pairs_of
from actmat.cli.screen import console, escape, plain_table, print_result, progress_bar
from actmat.cli.streams import optional_stdout, say

if TYPE_CHECKING:
    from pathlib import Path

    from actmat.cli.data import InputFlags
    from actmat.diagnostics.model import AgreementRow
    from actmat.extras.tune.progress import TuneProgress
    from actmat.extras.tune.report import TuneReport
    from actmat.extras.tune.sources import InputSettings
    from actmat.recipe import Recipe
    from actmat.run import MergeReport
    from actmat.settings import RunSettings


BETWEEN_LINES = 10.0
"""Seconds between lines about the search when no bar is shown."""


@contextlib.contextmanager
def showing_search(*, quiet: bool) -> Iterator[TuneProgress]:
    """Show progress on stderr: memory plan, notes, stage, best candidate so far, remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

    from actmat.extras.tune.evaluate import Trial
    from actmat.extras.tune.progress import TuneProgress

    columns = (BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(), TimeElapsedColumn())
    with progress_bar("{task.description}", *columns, quiet=quiet) as bar:
        task = bar.add_task("starting", total=None)
        lines = Lines(say)

        class Shown(TuneProgress):
            what, total, began, best = "", 0, 0.0, ""
            starts: ClassVar[dict[str, float]] = {}

            def doing(self, what: str, total: int = 0) -> None:
                self.what, self.total, self.best = what, total, ""
                self.began = self.starts.setdefault(what, time.monotonic())
                bar.reset(task, total=total or None, description=escape(what)[:60])
                lines.show(what + (f": {total}" if total else ""), now=True)

            def done(self, parts: int) -> None:
                bar.update(task, completed=parts)
                left = (time.monotonic() - self.began) / max(parts, 1) * (self.total - parts)
                ahead = f"about {left:.0f} s left" if parts < self.total else "finishing"
                lines.show(f"{self.what}: {parts} of {self.total}, {ahead}{self.best}", now=False)

            def note(self, text: str) -> None:
                if not quiet:
                    say(f"note: {text}")

            def trial(self, latest: Trial, best: Trial) -> None:
                self.best = f"; best so far: {best.candidate} ({best.mean:.4g})"
                bar.update(task, description=escape(self.what + self.best)[:60])

        with lines.regularly() if bar.disable and not quiet else contextlib.nullcontext():
            yield Shown()


class Lines:
    """Lines with the elapsed time, in place of a bar: each stage, and the latest state at regular intervals.

    Args:
        say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._began = say, time.monotonic()
        self._text, self._ended = "starting", threading.Event()
        self._on, self._shown = False, ""

    def show(self, text: str, *, now: bool) -> None:
        """Set the state; `now` prints it at once if it is new."""
        self._text = text
        if now and self._on and text != self._shown:
            self._print()

    @contextlib.contextmanager
    def regularly(self) -> Iterator[None]:
        """Print the state every `BETWEEN_LINES` seconds, even if nothing changed."""
        self._on = True
        thread = threading.Thread(target=self._repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(BETWEEN_LINES):
            self._print()

    def _print(self) -> None:
        self._shown = self._text
        self._say(f"{time.monotonic() - self._began:.0f} s: {self._text}")


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
    with showing_search(quiet=quiet) as progress:
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
    with showing_search(quiet=quiet) as progress:
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
    with showing_search(quiet=quiet) as progress:
        return measure_agreement(merged, data, settings, base=base, run=run, progress=progress)
