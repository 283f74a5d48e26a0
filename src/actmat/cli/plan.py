"""`actmat plan`: show what a merge would do to every tensor, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import RecipeFlags
from actmat.cli.signature import Fields
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.plan import MergePlan

__all__ = ["plan"]


def plan(
    *,
    recipe: flags.RecipeFile = None,
    given: Annotated[RecipeFlags, Fields(without=("out",))],
    run: Annotated[RunSettings, Fields(only=("device",))],
    json: flags.Json = False,
    every: Annotated[bool, typer.Option("--all", help="One line per tensor instead of groups.")] = False,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read
    and write, and the peak of memory. If the inputs do not fit together, all
    problems are listed and the exit code is 1.
    """
    from actmat.api import plan_recipe

    plans = [plan_recipe(r, device=run.device) for r in given.recipes(recipe)]
    if json:
        import json as json_module

        data = [p.to_json() for p in plans]
        typer.echo(json_module.dumps(data[0] if len(data) == 1 else data, indent=1))
        return
    from actmat.plan import MergePlan

    for p in plans:
        if isinstance(p, MergePlan):
            _print(p, every=every)
        else:
            from actmat.cli.adapters import print_plan

            print_plan(p, every=every)


def _print(p: MergePlan, *, every: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from actmat.cli.screen import console
    from actmat.errors import format_size
    from actmat.plan.model import count_actions

    console.print(f"[bold]{p.recipe.method}[/bold] over {len(p.experts)} experts of {escape(p.recipe.base)}")
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("tensors", justify="right")
    table.add_column("action")
    table.add_column("which, and why", overflow="fold")
    if every:
        for t in p.tensors:
            table.add_row("x".join(map(str, t.shape)), t.action, escape(f"{t.name}: {t.reason}"))
    else:
        for (action, reason), names in _groups(p).items():
            shown = names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")
            table.add_row(str(len(names)), action, f"{escape(reason)}\n[dim]{escape(shown)}[/dim]")
    console.print(table)
    counts = count_actions(p.tensors)
    console.print(
        f"{len(p.tensors)} tensors: " + ", ".join(f"{n} {a}" for a, n in counts.items() if n) + f"; family: "
        f"{p.family or 'not recognised, by names and shapes'}"
    )
    console.print(
        f"read {format_size(p.read_bytes)}, write {format_size(p.write_bytes)} in {len(p.shards)} file(s); peak memory "
        f"{format_size(p.peak_bytes(1))} with one worker, {format_size(p.peak_bytes(2))} with two"
    )
    for note in p.notes:
        console.print(f"note: {note}", markup=False)


def _groups(p: MergePlan) -> dict[tuple[str, str], list[str]]:
    out: dict[tuple[str, str], list[str]] = {}
    for t in p.tensors:
        out.setdefault((t.action, t.reason), []).append(t.name)
    return out
