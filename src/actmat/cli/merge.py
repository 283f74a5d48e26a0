"""`actmat merge`: merge fine-tuned checkpoints or adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.api import MergeReport
    from actmat.cli.screen import MergeProgress
    from actmat.recipe import Recipe

__all__ = ["merge"]


def merge(
    *,
    recipe: flags.RecipeFile = None,
    given: RecipeFlags,
    run: RunSettings,
    strict: flags.Strict = False,
    part: flags.PartOption = None,
    tune_scale: Annotated[
        list[str] | None,
        typer.Option(
            "--tune-scale",
            metavar="DATA",
            help="Choose the scale by unlabelled inputs of the experts; NAME=DATA, once per expert.",
        ),
    ] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Merge fine-tuned checkpoints of one base into one model.

    actmat merge -b BASE -e EXPERT1 -e EXPERT2 --out MERGED
    actmat merge -b BASE -e E1 -e E2 -m ties -o density=0.3 --out MERGED
    actmat merge -e ADAPTER1 -e ADAPTER2 --out MERGED   (LoRA adapters, no base)
    actmat merge recipe.yaml --out MERGED

    Several --method, or several values of an --option, give one output each,
    below OUT. An output is a directory that from_pretrained loads. It appears
    when it is complete; the same command continues an interrupted merge.
    With --part 3/16, it is made in parts by as many processes, on machines that
    share its folder; 'actmat finish OUT' completes it.
    With --tune-scale math=math.jsonl --tune-scale code=code.jsonl, the scale is
    the one at which the merged model answers most as the experts do ('actmat
    tune' searches methods, too).
    'actmat plan' shows beforehand what will happen to every tensor.
    """
    recipes = given.recipes(recipe)
    if (strict or run.exact) and not run.diagnose:
        raise typer.BadParameter("--strict and --exact go with --diagnose")
    if any(r.out is None for r in recipes):
        raise typer.BadParameter("say where the merged model goes: --out OUT, or 'out' in the recipe")
    if part is not None:
        if tune_scale:
            raise typer.BadParameter("--tune-scale needs the whole merge: find the scale first, then merge in parts")
        _merge_part(recipes, part, run, json=json, quiet=quiet)
        return
    if tune_scale:
        reports = _merge_at_tuned_scale(recipes, tune_scale, run, given, quiet=quiet or json)
        _end(reports, strict=strict, json=json)
        return
    from actmat.api import run_recipes

    with _showing(recipes, quiet=quiet or json) as progress:
        reports = run_recipes(recipes, run, progress)
    if not quiet and not json:
        from actmat.cli.summary import print_summary

        with optional_stdout("The merge is complete."):
            for report in reports:
                print_summary(report)
    _end(reports, strict=strict, json=json)


@contextmanager
def _showing(recipes: Sequence[Recipe], *, quiet: bool) -> Iterator[MergeProgress | None]:
    """A bar over the tensors; bars of the hub's library where an output goes there."""
    from actmat.cli.screen import hub_bars, showing_progress

    to_hub = any(str(r.out).startswith("hf://") for r in recipes)
    with hub_bars(quiet=quiet) if to_hub else nullcontext(), showing_progress(quiet=quiet) as progress:
        yield progress


def _end(reports: Sequence[MergeReport], *, strict: bool, json: bool) -> None:
    """Print JSON if that was asked for; exit with 1 if checks found something and that was asked for."""
    if json:
        from actmat.cli.results import merge_data, print_result

        with optional_stdout("The merge is complete."):
            print_result("merge", {"outputs": [merge_data(r) for r in reports]})
    if strict and any(r.diagnosis is not None and r.diagnosis.issues for r in reports):
        raise typer.Exit(1)


def _merge_at_tuned_scale(
    recipes: list[Recipe], data: Sequence[str], run: RunSettings, given: RecipeFlags, *, quiet: bool
) -> list[MergeReport]:
    """Choose the scale of every recipe, merge, and say what was done."""
    if "scale" in given:
        raise typer.BadParameter("--tune-scale chooses the scale: drop --scale")
    from actmat.extras.collect.commands.agreement import pairs_of
    from actmat.extras.tune.commands.searching import merge_at_tuned_scales, print_search

    reports = merge_at_tuned_scales(recipes, pairs_of(data, "--tune-scale"), run, quiet=quiet)
    if not quiet:
        from actmat.cli.summary import print_summary

        with optional_stdout("The merge is complete."):
            for report in reports:
                print_summary(report.merged)
                print_search(report)
    return [r.merged for r in reports]


def _merge_part(recipes: Sequence[Recipe], text: str, run: RunSettings, *, json: bool, quiet: bool) -> None:
    """Run one part and say what it did."""
    if len(recipes) > 1:
        raise typer.BadParameter("--part goes with one method and one value of each option")
    from actmat.cli.screen import console, escape, showing_progress
    from actmat.engine.shares import Part
    from actmat.run.parts import run_part

    part = Part.parse(text)
    with showing_progress(f"part {part}", quiet=quiet) as progress:
        report = run_part(recipes[0], part, run, progress, command=flags.without_part(sys.argv[1:]))
    if json:
        from actmat.cli.results import print_result

        done = {"part": str(part), "out": str(report.out), "tensors": report.items, "resumed": report.resumed}
        with optional_stdout("The part is complete."):
            print_result("merge", {"outputs": [], "part": {**done, "was_finished": report.was_finished}})
    if quiet or json:
        return
    with optional_stdout("The part is complete."):
        if report.was_finished:
            console.print(f"{escape(report.out)} is complete: all parts were finished earlier; nothing was done")
            return
        console.print(f"part {part} of [bold]{escape(report.out)}[/bold]: {report.items} tensors", end="")
        console.print(f", {report.resumed} of them from an earlier attempt" if report.resumed else "")
        console.print(f"  in {report.seconds:.1f} s; when all parts are there: actmat finish {escape(report.out)}")
