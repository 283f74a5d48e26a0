"""Terminal output of a search: its memory plan, the best candidate so far, and the result."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmat.cli.flags import InputFlags
    from actmat.extras.tune.report import TuneReport
    from actmat.extras.tune.settings import TuneProgress
    from actmat.recipe import Recipe
    from actmat.run import MergeReport
    from actmat.settings import RunSettings


BETWEEN_LINES = 10.0
"""Seconds between lines about the search when no bar is shown."""


@contextlib.contextmanager
def showing_search(*, quiet: bool) -> Iterator[TuneProgress]:
    """Show progress on stderr: memory plan, notes, stage, best candidate so far, remaining time."""
    from rich.progress import TimeElapsedColumn

    from actmat.cli.screen import escape, progress_bar
    from actmat.cli.streams import say
    from actmat.extras.tune.evaluate import Trial
    from actmat.extras.tune.memory import MemoryPlan
    from actmat.extras.tune.settings import TuneProgress

    with progress_bar("{task.description}", TimeElapsedColumn(), quiet=quiet) as bar:
        task = bar.add_task("starting", total=None)
        lines = Lines(say)

        class Shown(TuneProgress):
            tried = 0
            rest = ""

            def doing(self, what: str) -> None:
                self.rest = ""
                self._show(what, now=True)

            def planned(self, plan: MemoryPlan) -> None:
                if not quiet:
                    say("\n".join(plan.lines()))

            def note(self, text: str) -> None:
                if not quiet:
                    say(f"note: {text}")

            def left(self, seconds: float) -> None:
                self.rest = f"; about {seconds:.0f} s left"

            def trial(self, found: Trial, best: Trial) -> None:
                self.tried += 1
                self._show(f"{self.tried} tried{self.rest}; best so far: {best.candidate} ({best.mean:.4g})", now=False)

            def _show(self, text: str, *, now: bool) -> None:
                bar.update(task, description=escape(text)[:70])
                lines.show(text, now=now)

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
        self._on = False

    def show(self, text: str, *, now: bool) -> None:
        """Set the state; `now` prints it at once."""
        self._text = text
        if now and self._on:
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
        self._say(f"{time.monotonic() - self._began:.0f} s: {self._text}")


def print_search(report: TuneReport) -> None:
    """Print the chosen merge, the final comparison, and the folder with the other files."""
    from actmat.cli.screen import console, escape, plain_table

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


def tune_scales(recipes: Sequence[Recipe], data: Sequence[str], run: RunSettings, *, quiet: bool) -> list[MergeReport]:
    """Merge each recipe at the scale chosen from unlabeled inputs (`--set tune_scale=true`); print summaries.

    Args:
        data: values of the flag: NAME=DATA, or one data set for all experts.
    """
    from actmat.cli.data import pairs_of
    from actmat.cli.streams import optional_stdout
    from actmat.cli.summary import print_summary
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.tuning import scale_space, tune_recipe

    places = pairs_of(data)
    reports = []
    with showing_search(quiet=quiet) as progress:
        for recipe in recipes:
            settings = TuneSettings(average=False)
            reports.append(tune_recipe(recipe, scale_space, places, settings, run, progress))
    if not quiet:
        with optional_stdout("The merge is complete."):
            for report in reports:
                print_summary(report.merged)
                print_search(report)
    return [report.merged for report in reports]


def merge_by(
    given: InputFlags, recipes: Sequence[Recipe], run: RunSettings, *, as_adapter: bool, quiet: bool
) -> list[MergeReport]:
    """Merge by inputs of the experts and compare answers; `as_adapter`: adapters become an adapter."""
    import typer

    from actmat.cli.data import pairs_of
    from actmat.extras.tune.with_inputs import InputSettings, merge_with_inputs

    data, check = (pairs_of(values or [], flag) for values, flag in ((given.data, "--data"), (given.check, "--check")))
    if isinstance(data, str) or isinstance(check, str):
        raise typer.BadParameter("every expert needs inputs of its own task: give --data NAME=INPUTS once per expert")
    options = given.options("", max_samples=given.samples, label_column=given.label_column)
    settings = InputSettings(
        reading=options,
        new_tokens=given.new_tokens,
        model_class=given.model_class,
        dtype=given.model_dtype,
        keep_statistics=given.keep_statistics,
        as_adapter=as_adapter,
    )
    with showing_search(quiet=quiet) as progress:
        return merge_with_inputs(recipes, data, check, settings, run, progress)
