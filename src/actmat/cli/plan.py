"""`actmat plan`: show what a merge would do to every tensor, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.settings import RunSettings

__all__ = ["plan"]


def plan(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("out",))],
    run: Annotated[RunSettings, Fields(only=("device", "device_memory"))],
    json: flags.Json = False,
    every: Annotated[bool, typer.Option("--all", help="One line per tensor instead of groups.")] = False,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read
    and write, and the peak of memory. If the inputs do not fit together, all
    problems are listed and the exit code is 1.
    """
    from actmat.api import plan_recipe

    plans = [plan_recipe(r, device=run.device, device_memory=run.device_memory) for r in given.recipes(recipe)]
    if json:
        from actmat.cli.screen import print_json

        data = [p.to_json() for p in plans]
        print_json(data[0] if len(data) == 1 else data)
        return
    from actmat.cli.summary import print_plan

    for p in plans:
        print_plan(p, every=every)
