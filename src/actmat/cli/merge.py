"""`actmat merge`: merge fine-tuned checkpoints or adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.streams import optional_stdout, starting
from actmat.settings import RunSettings

__all__ = ["merge"]


def merge(
    *,
    recipe: flags.RecipeFile = None,
    given: RecipeFlags,
    run: RunSettings,
    strict: flags.Strict = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:
    """Merge fine-tuned checkpoints of one base into one model.

    actmat merge -b BASE -e EXPERT1 -e EXPERT2 --out MERGED
    actmat merge -b BASE -e E1 -e E2 -m ties -o density=0.3 --out MERGED
    actmat merge -e ADAPTER1 -e ADAPTER2 --out MERGED   (LoRA adapters, no base)
    actmat merge recipe.yaml --out MERGED

    Several --method, or several values of an --option, give one output each,
    below OUT. An output is a directory that from_pretrained loads. It appears
    when it is complete; the same command continues an interrupted merge.
    'actmat plan' shows beforehand what will happen to every tensor.
    """
    starting("merge", quiet=quiet)
    recipes = given.recipes(recipe)
    if (strict or run.exact) and not run.diagnose:
        raise typer.BadParameter("--strict and --exact go with --diagnose")
    if any(r.out is None for r in recipes):
        raise typer.BadParameter("say where the merged model goes: --out OUT, or 'out' in the recipe")
    from actmat.api import run_recipes
    from actmat.cli.screen import showing_progress

    with showing_progress(quiet=quiet) as progress:
        reports = run_recipes(recipes, run, progress)
    if not quiet:
        from actmat.cli.summary import print_summary

        with optional_stdout("The merge is complete."):
            for report in reports:
                print_summary(report)
    if strict and any(r.diagnosis is not None and r.diagnosis.issues for r in reports):
        raise typer.Exit(1)
