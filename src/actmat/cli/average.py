"""`actmat average`: average the checkpoints of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.planning import MergePlan

__all__ = ["average"]

_OF_RECIPE = ("out", "dtype", "compute_dtype", "max_shard_size", "allow_nonfinite", "ties")


def average(
    *,
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINT", help="Directories, files, hub ids, URLs.")],
    weights: Annotated[
        str,
        typer.Option("--weights", help="uniform, linear, ema:DECAY, wsd, or a number per checkpoint."),
    ] = "uniform",
    as_given: Annotated[bool, typer.Option("--as-given", help="Keep this order; default: by step numbers.")] = False,
    given: Annotated[RecipeFlags, Fields(only=_OF_RECIPE)],
    run: Annotated[RunSettings, Fields(without=("diagnose", "exact"))],
    plan: Annotated[bool, typer.Option("--plan", help="Show weights and tensors; write nothing.")] = False,
    shown: Annotated[flags.OutputFlags, Fields(without=("full",))],
) -> None:
    """Average checkpoints of one training run; no base is needed.

    actmat average step-*/ --out MERGED
    actmat average step-*/ --weights wsd --out MERGED
    actmat average a b c --weights 0.2,0.3,0.5 --out MERGED

    Checkpoints are put in the order of the numbers in their names, so that
    step-200 comes before step-1000. The output has the config and tokenizer
    files of the last one. One chunk of each is read after the other, so that
    memory does not grow with their number.
    """
    from actmat.api import average_recipe, plan_recipe, run_recipes

    fields = {name: value for name, value in given.values.items() if name in given}
    recipe = average_recipe(checkpoints, weights, as_given=as_given, **fields)
    if plan:
        _show_plan(plan_recipe(recipe, device=run.device, device_memory=run.device_memory), shown)
        return
    if recipe.out is None:
        raise typer.BadParameter("say where the average goes: --out OUT")
    from actmat.cli.screen import showing_progress

    with showing_progress(quiet=shown.quiet) as progress:
        reports = run_recipes([recipe], run, progress)
    if shown.json:
        from actmat.cli.results import merge_data, print_result

        with optional_stdout("The average is complete."):
            print_result("average", {"outputs": [merge_data(r) for r in reports]})
    elif not shown.quiet:
        from actmat.cli.summary import print_summary

        with optional_stdout("The average is complete."):
            print_summary(reports[0])


def _show_plan(plan: MergePlan, shown: flags.OutputFlags) -> None:
    """Weights and tensors of the average, which is not made."""
    if shown.json:
        from actmat.cli.plan import compact
        from actmat.cli.results import print_result

        print_result("average", {"outputs": [], "plan": compact(plan)})
    elif not shown.quiet:
        from actmat.cli.summary import print_plan

        print_plan(plan, full=False)
