"""`actmat extract`: an adapter from a fine-tuned model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.api.extracting import ExtractReport

__all__ = ["extract", "extraction_data"]


def extract(
    *,
    base: Annotated[str, typer.Option("--base", "-b", help="Checkpoint that the model was fine-tuned from.")],
    model: Annotated[str, typer.Option("--model", help="Fine-tuned checkpoint, or an adapter of any family.")],
    given: Annotated[RecipeFlags, Fields(only=("out", "rank", "energy", "others", "dtype"))],
    run: Annotated[RunSettings, Fields(without=("device", "device_memory", "exact"))],
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done; write nothing.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model: the best approximation of its delta, layer by layer.

    actmat extract --base BASE --model MODEL --rank 64 --out ADAPTER
    actmat extract --base BASE --model MODEL --energy 0.99 --out ADAPTER

    It is a merge of one expert, so that verify, report and history know it; the
    error of every layer is in actmat_manifest.json. PEFT loads the adapter.
    Interrupted, the same command goes on.
    """
    from actmat.api import plan_recipe, run_recipes
    from actmat.api.extracting import extract_recipe, report_of
    from actmat.cli.screen import showing_progress
    from actmat.cli.summary import print_plan, print_summary

    recipe = extract_recipe(base, model, **{name: value for name, value in given.values.items() if name in given})
    if plan:
        print_plan(plan_recipe(recipe), full=False)
        return
    if recipe.out is None:
        raise typer.BadParameter("say where the adapter goes: --out OUT")
    with showing_progress(quiet=quiet or json) as progress:
        (report,) = run_recipes([recipe], run, progress)
    with optional_stdout("The adapter is complete."):
        if json:
            from actmat.cli.results import print_result

            print_result("extract", extraction_data(report_of(report)))
        elif not quiet:
            print_summary(report)


def extraction_data(report: ExtractReport) -> dict[str, Any]:
    """An extracted adapter as plain data; the error of every layer is in its manifest."""
    rows: list[dict[str, Any]] = list(report.record["tensors"])
    return {
        "out": str(report.out),
        "was_finished": report.was_finished,
        "relative_error": report.relative_error,
        "layers": sum(r["kind"] == "factored" for r in rows),
        "saved": sum(r["kind"] == "saved" for r in rows),
        "left_out": sum(r["kind"] == "left out" for r in rows),
        "notes": list(report.record["notes"]),
    }
