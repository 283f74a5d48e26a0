"""`actmat merge`: merge fine-tuned checkpoints or adapters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.api import MergeReport
    from actmat.recipe import Recipe

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

    The output is a directory that from_pretrained loads. It appears when it
    is complete; the same command continues an interrupted merge.
    'actmat plan' shows beforehand what will happen to every tensor.
    """
    recipes = given.recipes(recipe)
    if (strict or run.exact) and not run.diagnose:
        raise typer.BadParameter("--strict and --exact go with --diagnose")
    if any(r.out is None for r in recipes):
        raise typer.BadParameter("say where the merged model goes: --out OUT, or 'out' in the recipe")
    reports = _run(recipes, run, quiet=quiet)
    if not quiet:
        for report in reports:
            _summary(report)
    if strict and any(r.diagnosis is not None and r.diagnosis.issues for r in reports):
        raise typer.Exit(1)


def _run(recipes: list[Recipe], settings: RunSettings, *, quiet: bool) -> list[MergeReport]:
    from actmat.api import run_recipes
    from actmat.cli.progress import showing_progress

    with showing_progress(quiet=quiet) as progress:
        return run_recipes(recipes, progress=progress, **dataclasses.asdict(settings))


def _summary(report: MergeReport) -> None:
    from rich.markup import escape

    from actmat.cli.screen import console
    from actmat.errors import format_size
    from actmat.plan.model import MergePlan, count_actions

    plan = report.plan
    if not isinstance(plan, MergePlan):
        from actmat.cli.adapters import print_summary

        print_summary(plan, report.manifest, report.out, report.seconds)
        _judgement(report)
        return
    words = {"merge": "merged", "average": "averaged", "copy": "copied", "tie": "tied"}
    counts = ", ".join(f"{n} {words[a]}" for a, n in count_actions(plan.tensors).items() if n)
    tensors = report.manifest["tensors"]
    unchanged = sum(t["unchanged"] and t["action"] in ("merge", "average") for t in tensors)
    console.print(f"[bold]{escape(str(report.out))}[/bold]  ({plan.recipe.method}; {len(plan.experts)} experts)")
    console.print(f"  {counts}" + (f"; {unchanged} of them unchanged by every expert" if unchanged else ""))
    console.print(
        f"  {format_size(plan.read_bytes)} read, {format_size(plan.write_bytes)} written in {report.seconds:.1f} s; "
        "all hashes in actmat_manifest.json"
    )
    for note in plan.notes:
        console.print(f"  note: {note}", markup=False)
    if nonfinite := sum(t["nonfinite"] for t in tensors):
        console.print(f"  note: {nonfinite} NaN or Inf entries of experts were treated as unchanged")
    _judgement(report)


def _judgement(report: MergeReport) -> None:
    """Print the findings of the checks, if the merge was diagnosed."""
    if report.diagnosis is not None:
        from actmat.cli.diagnosis import print_checks

        print_checks(report.diagnosis.checks)
