"""`actmat tune`: find the best merge from unlabelled inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from actmat.cli import flags
from actmat.cli.agreement import DataFlags, pairs_of
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.cli.streams import starting
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.tune import Space, Trial, TuneReport

__all__ = ["tune"]


def _option(flag: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Search", **more)


@dataclass(frozen=True)
class SearchFlags:
    """Flags of the search."""

    methods: Annotated[str | None, _option("--methods", "Methods to try, as a,b,c, or 'all' (default: ten).")] = None
    scales: Annotated[str | None, _option("--scales", "Scales to try, as 0.3,0.5,1.")] = None
    groups: Annotated[str, _option("--groups", "Factors by group: none, kind, depth or kind-depth.")] = "none"
    weights: Annotated[bool, _option("--tune-weights", "Search the experts' weights too.")] = False
    space: Annotated[Path | None, _option("--space", "YAML file with methods, options, scales, groups.")] = None
    score: Annotated[str, _option("--score", "divergence, disagreement; with labels accuracy, perplexity.")] = (
        "divergence"
    )
    label_column: Annotated[str | None, _option("--label-column", "Labels, for --score accuracy.")] = None
    budget: Annotated[str | None, _option("--budget", "Evaluations (200) or time (15m).")] = None
    least_agreement: Annotated[
        float, _option("--least-agreement", "Share of its predictions that every expert keeps.", min=0, max=1)
    ] = 0.0
    inputs: Annotated[int, _option("--samples", "Inputs per expert; half choose, half compare.", min=2)] = 128
    new_tokens: Annotated[int, _option("--new-tokens", "Tokens that a generating expert adds to an input.", min=0)] = 32
    model_dtype: Annotated[str, _option("--model-dtype", "dtype of the models while they run.")] = "float32"
    keep_work: Annotated[bool, _option("--keep-work", "Keep the merges that were tried.")] = False

    def chosen_space(self) -> Space:
        """The space of the file, or of the flags.

        Raises:
            RecipeError: it is not valid.
        """
        from actmat.tune import load_space, make_space

        if self.space is not None:
            if self.methods or self.scales:
                raise typer.BadParameter("--space names methods and scales itself: drop --methods and --scales")
            return load_space(self.space)
        listed = {"methods": self.methods, "scales": self.scales}
        fields: dict[str, Any] = {k: [x.strip() for x in v.split(",") if x.strip()] for k, v in listed.items() if v}
        return make_space(fields | {"groups": self.groups, "weights": self.weights})


def tune(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("method", "options", "scale", "space"))],
    run: Annotated[RunSettings, Fields(without=("diagnose", "exact"))],
    data: Annotated[DataFlags, Fields(without=("samples", "dtype"))],
    search: SearchFlags,
    json: flags.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Find the best merge from a few unlabelled inputs of each expert.

    actmat tune -b BASE -e math=M -e code=C
           --data math=math.jsonl --data code=code.jsonl --out BEST

    Every method is merged once and tried at every scale in memory; the score is
    how far the merged model's predictions are from each expert's own, on that
    expert's inputs. No labels are needed. Half of the inputs are kept back to
    say whether the winner is better than the average. BEST.tune holds the
    recipe, all trials (tune.json) and a page (tune.html). The same command goes
    on after an interruption.
    """
    starting("tune", quiet=quiet)
    from actmat.tune import TuneSettings, tune_recipe
    from actmat.tune.evaluate import Named, Score
    from actmat.tune.search import parse_budget

    (wanted, *_) = given.recipes(recipe)
    if wanted.out is None:
        raise typer.BadParameter("say where the merged model goes: --out OUT, or 'out' in the recipe")
    if search.score not in get_args(Named):
        raise typer.BadParameter(f"--score is one of {', '.join(get_args(Named))}; got '{search.score}'")
    if not data.data:
        raise typer.BadParameter("give unlabelled inputs: --data NAME=DATA, once per expert")
    named = pairs_of(data.data)
    places = dict.fromkeys(wanted.labels, named) if isinstance(named, str) else named
    settings = TuneSettings(
        score=cast(Score, search.score),
        budget=parse_budget(search.budget),
        least_agreement=search.least_agreement,
        model_class=data.model_class,
        dtype=search.model_dtype,
        device=run.device,
        new_tokens=search.new_tokens,
        keep=search.keep_work,
    )
    sources = {
        name: data.options(place, max_samples=search.inputs, label_column=search.label_column)
        for name, place in places.items()
    }
    with _shown(quiet=quiet or json) as progress:
        report = tune_recipe(wanted, search.chosen_space(), sources, settings, run, progress)
    if json:
        from actmat.cli.screen import print_json

        print_json(report.to_json())
    elif not quiet:
        _print(report)


def _shown(*, quiet: bool) -> Any:
    """Progress on stderr: the stage, and the best candidate so far."""
    import contextlib

    from rich.progress import TimeElapsedColumn

    from actmat.cli.screen import escape, progress_bar
    from actmat.tune import TuneProgress

    @contextlib.contextmanager
    def showing() -> Any:
        with progress_bar("{task.description}", TimeElapsedColumn(), quiet=quiet) as bar:
            task = bar.add_task("starting", total=None)

            class Shown(TuneProgress):
                def doing(self, what: str) -> None:
                    bar.update(task, description=escape(what)[:70])

                def trial(self, found: Trial, best: Trial) -> None:
                    bar.update(task, description=f"best so far: {escape(best.candidate)} ({best.mean:.4g})"[:70])

            yield Shown()

    return showing()


def _print(report: TuneReport) -> None:
    """The chosen merge, the final comparison, and where the rest is."""
    from actmat.cli.screen import console, escape, plain_table

    console.print(f"[bold]{escape(report.out)}[/bold]: {escape(report.chosen.candidate)}")
    console.print(f"{len(report.trials)} trials; {report.score} on inputs that the search did not see:\n")
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
