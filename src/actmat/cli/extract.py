"""`actmat extract`: an adapter from a fine-tuned model."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.flags import FlagFields, RecipeFlags
from actmat.cli.listing import command
from actmat.cli.merge import carry_out
from actmat.settings import RunSettings


@command("merge", "extracted, or already complete", imports_torch=True)
def extract(
    *,
    base: Annotated[str, typer.Option("--base", "-b", help="Checkpoint that the model was fine-tuned from.")],
    model: Annotated[str, typer.Option("--model", help="Fine-tuned checkpoint, or an adapter of any family.")],
    fields: Annotated[RecipeFlags, FlagFields(only=("out", "rank", "dtype", "others", "drop"))],
    run: Annotated[RunSettings, FlagFields(without=("device", "device_memory"))],
    plan: flags.Plan = False,
    shown: flags.JsonQuiet,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model: the best approximation of every layer's delta.

    actmat extract --base BASE --model MODEL --rank 64 --out ADAPTER

    The error of every layer is in actmat_manifest.json. PEFT loads the adapter;
    verify, diagnose and inspect read it like a merge. To continue an
    interrupted extraction, repeat the command.
    """
    from actmat.api.extracting import extract_recipe

    carry_out([extract_recipe(base, model, **fields.chosen)], run, shown, plan=plan, layout="extract")
