"""`actmat plan`: show what a merge would do to every tensor, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.planning import MergePlan

__all__ = ["compact", "plan"]


def plan(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("out",))],
    run: Annotated[RunSettings, Fields(only=("device", "device_memory"))],
    json: flags.Json = False,
    part: flags.PartOption = None,
    full: Annotated[bool, typer.Option("--full", "--all", help="One line per tensor instead of groups.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read
    and write, the peak of memory and a rough time. If the inputs do not fit
    together, all problems are listed and the exit code is 1. --part 3/16 shows
    what that part would do.
    """
    from actmat.api import plan_recipe

    plans = [plan_recipe(r, device=run.device, device_memory=run.device_memory) for r in given.recipes(recipe)]
    if part is not None:
        _print_part(plans, part, json=json, full=full, quiet=quiet)
        return
    if json:
        _print_json(plans, full=full)
    if json or quiet:
        return
    from actmat.cli.summary import print_plan

    for one in plans:
        print_plan(one, full=full)


def _print_json(plans: Sequence[MergePlan], *, full: bool) -> None:
    """Groups of tensors; if `full`, the plans as `MergePlan.from_json` reads them."""
    from actmat.cli.results import print_result
    from actmat.cli.screen import print_json

    if full:
        data = [plan.to_json() for plan in plans]
        print_json(data[0] if len(data) == 1 else data)
    else:
        print_result("plan", {"plans": [compact(plan) for plan in plans]})


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
        "seconds_one_worker": plan.seconds,
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
