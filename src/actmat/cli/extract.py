"""`actmat extract`: an adapter from a fine-tuned model."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.flags import FlagFields, RecipeFlags
from actmat.cli.listing import command
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings


@command("merge", "extracted, or already complete", imports_torch=True)
def extract(
    *,
    base: Annotated[str, typer.Option("--base", "-b", help="Checkpoint that the model was fine-tuned from.")],
    model: Annotated[str, typer.Option("--model", help="Fine-tuned checkpoint, or an adapter of any family.")],
    given: Annotated[RecipeFlags, FlagFields(only=("out", "rank", "dtype"))],
    run: Annotated[RunSettings, FlagFields(without=("device", "device_memory"))],
    others: Annotated[
        str,
        typer.Option("--others", help="Changed tensors that LoRA cannot hold (norms, tables): 'save' or 'leave' them."),
    ] = "save",
    plan: Annotated[bool, typer.Option("--plan", help="Show the plan; write nothing.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model: the best approximation of every layer's delta.

    actmat extract --base BASE --model MODEL --rank 64 --out ADAPTER

    The error of every layer is in actmat_manifest.json. PEFT loads the adapter;
    verify, diagnose and inspect read it like a merge. To continue an
    interrupted extraction, repeat the command.
    """
    from actmat.api.extracting import extract_recipe, report_of
    from actmat.api.merging import merge_recipes
    from actmat.cli.plan import show_plans
    from actmat.cli.screen import print_result, showing_progress
    from actmat.cli.summary import extraction_data, print_summary, print_warnings

    recipe = extract_recipe(base, model, **given.given, others=others)
    if plan:
        show_plans([recipe], run, json=json, quiet=quiet)
        return
    if recipe.out is None:
        raise typer.BadParameter("no output given: pass --out OUT")
    with showing_progress(quiet=quiet or json) as progress:
        (report,) = merge_recipes([recipe], run, progress)
    with optional_stdout("The adapter is complete."):
        if json:
            print_result("extract", extraction_data(report_of(report)))
        elif quiet:
            print_warnings(report.plan)
        else:
            print_summary(report)
