"""`actmat plan`: show what a merge would do to every tensor, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.timing.predict import Prediction

__all__ = ["plan"]


def plan(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("out",))],
    run: Annotated[RunSettings, Fields(only=("device",))],
    json: flags.Json = False,
    every: Annotated[bool, typer.Option("--all", help="One line per tensor instead of groups.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="Predict the time on NODES machines like this one; 4x16: 16 workers each."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="With --simulate: bytes per second of storage that all nodes share, such as 10GB."),
    ] = None,
    rates: Annotated[
        Path | None, typer.Option(help="With --simulate: rates of another machine, from 'actmat calibrate --out'.")
    ] = None,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read
    and write, and the peak of memory. If the inputs do not fit together, all
    problems are listed and the exit code is 1.
    """
    from actmat.api import plan_recipe

    if simulate is None and (bandwidth is not None or rates is not None):
        raise typer.BadParameter("--bandwidth and --rates are for --simulate NODES")
    plans = [plan_recipe(r, device=run.device) for r in given.recipes(recipe)]
    predictions: list[Prediction] = []
    if simulate is not None:
        from actmat.timing.predict import predict
        from actmat.timing.rates import load_rates

        known = load_rates(rates)
        predictions = [predict(p, known, simulate, bandwidth) for p in plans]
    if json:
        from actmat.cli.screen import print_json

        data = [p.to_json() for p in plans]
        for one, prediction in zip(data, predictions, strict=False):
            one["prediction"] = prediction.to_json()
        print_json(data[0] if len(data) == 1 else data)
        return
    from actmat.cli.screen import console, escape
    from actmat.cli.summary import print_plan

    for k, p in enumerate(plans):
        print_plan(p, every=every)
        for line in predictions[k].lines if predictions else ():
            console.print(escape(line))
