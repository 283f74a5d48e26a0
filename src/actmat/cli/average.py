"""`actmat average`: average checkpoints of one training run."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.flags import FlagFields, RecipeFlags
from actmat.cli.listing import command
from actmat.cli.merge import carry_out
from actmat.settings import RunSettings

OF_AVERAGE = (
    *("out", "dtype", "compute_dtype", "max_shard_size", "ties"),
    *("keep", "drop", "vocabulary", "files_from", "config_from"),
)
"""Recipe fields that an average has."""


@command("merge", "averaged, or already complete", imports_torch=True)
def average(
    weights: Annotated[
        str, typer.Argument(help="uniform, linear, ema:DECAY such as ema:0.9, wsd, or a number per checkpoint: 1,2,1.")
    ],
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoints, sorted by the numbers in their names.")],
    *,
    fields: Annotated[RecipeFlags, FlagFields(only=OF_AVERAGE)],
    run: RunSettings,
    plan: flags.Plan = False,
    shown: flags.JsonQuiet,
) -> None:
    """Average checkpoints of one training run, or runs from one start; needs no base.

    actmat average uniform step-*/ --out AVERAGED
    actmat average ema:0.9 step-*/ --out AVERAGED

    Config and tokenizer are those of the last checkpoint. To continue an
    interrupted average, repeat the command.
    """
    from actmat.extras.averaging.recipe import average_recipe

    carry_out([average_recipe(checkpoints, weights, **fields.chosen)], run, shown, plan=plan, layout="average")
