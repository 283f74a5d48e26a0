"""`actmat plan`: show what a merge would do to every tensor, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.cli.simulation import SimulationFlags
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.planning import MergePlan

__all__ = ["compact", "plan"]


def plan(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("out",))],
    run: Annotated[RunSettings, Fields(only=("device", "device_memory"))],
    simulation: Annotated[SimulationFlags, Fields()],
    json: flags.Json = False,
    part: flags.PartOption = None,
    full: Annotated[bool, typer.Option("--full", "--all", help="One line per tensor instead of groups.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read
    and write, and the peak of memory. If the inputs do not fit together, all
    problems are listed and the exit code is 1. --part 3/16 shows what that part
    would do. --simulate predicts the time from the rates that 'actmat calibrate'
    measured.
    """
    from actmat.api import plan_recipe

    plans = [plan_recipe(r, device=run.device, device_memory=run.device_memory) for r in given.recipes(recipe)]
    if part is not None:
        _print_part(plans, part, json=json, full=full, quiet=quiet)
        return
    predictions = simulation.predictions(plans)
    if json:
        _print_json(plans, [p.to_json() for p in predictions], full=full)
    if json or quiet:
        return
    from actmat.cli.screen import console, escape
    from actmat.cli.summary import print_plan

    for k, p in enumerate(plans):
        print_plan(p, full=full)
        for line in predictions[k].lines if predictions else ():
            console.print(escape(line))


def _print_json(plans: Sequence[MergePlan], predictions: Sequence[Mapping[str, Any]], *, full: bool) -> None:
    """Groups of tensors; if `full`, the plans as `MergePlan.from_json` reads them."""
    from actmat.cli.results import print_result
    from actmat.cli.screen import print_json

    data = [plan.to_json() for plan in plans] if full else [compact(plan) for plan in plans]
    for one, prediction in zip(data, predictions, strict=False):
        one["prediction"] = prediction
    if full:
        print_json(data[0] if len(data) == 1 else data)
    else:
        print_result("plan", {"plans": data})


def compact(plan: MergePlan) -> dict[str, Any]:
    """A plan without its tensors: how many have the same action for the same reason, and totals."""
    groups = Counter((i.action, i.call.method if i.call else None, i.reason) for i in plan.items)
    first = {key: i.name for i in reversed(plan.items) for key in [(i.action, i.call and i.call.method, i.reason)]}
    rows = [
        {"action": key[0], "method": key[1], "count": n, "reason": key[2], "first": first[key]}
        for key, n in groups.items()
    ]
    return {
        "kind": plan.output,
        "method": plan.recipe.method,
        "base": plan.recipe.base,
        "experts": [e.label for e in plan.experts],
        "family": plan.family,
        "items": len(plan.items),
        "groups": rows,
        "kept": len(plan.kept),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "peak_bytes": plan.peak_bytes(1),
        "device": plan.device,
        "notes": list(plan.notes),
    }


def _print_part(plans: Sequence[MergePlan], text: str, *, json: bool, full: bool, quiet: bool) -> None:
    """Print the share of one part."""
    if len(plans) > 1:
        raise typer.BadParameter("--part goes with one method and one value of each option")
    from actmat.cli.summary import print_part
    from actmat.engine.shares import Part, plan_part

    share = plan_part(plans[0], Part.parse(text))
    if json:
        from actmat.cli.results import print_result

        print_result("plan", {"plans": [], "part": share.to_json()})
    if json or quiet:
        return
    print_part(plans[0], share, full=full)
