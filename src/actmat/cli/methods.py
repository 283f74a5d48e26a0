"""`actmat methods`: list the merge methods from their declarations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, plain_table, print_result


@command("choose", "listed", "unknown method")
def methods(
    name: Annotated[str | None, typer.Argument(help="Method to show in full, such as ties.")] = None,
    shown: flags.OutputFlags = flags.USUAL,
) -> None:
    """List the merge methods; with a NAME, its equation, options, defaults, needs and reference."""
    from actmat.cli.catalog import read_catalog

    if name == "auto":
        raise typer.BadParameter("auto is one of the methods, by your experts: 'actmat plan' names it, and says why")
    known = read_catalog()
    chosen = [*known.values(), *_more(known)] if name is None else [known.get(name) or _one(name)]
    if shown.json:
        short = ("name", "summary", "needs", "low_rank", "gflop")
        rows = chosen if shown.full or name is not None else [{key: m[key] for key in short} for m in chosen]
        print_result("methods", {"methods": rows})
    elif shown.quiet:
        return
    elif name is None:
        _table(chosen)
    else:
        _show(chosen[0])


def _more(known: Collection[str]) -> list[dict[str, Any]]:
    """Declarations of methods from other distributions."""
    from actmat.plugins import entries

    if set(entries("actmat.methods")) <= set(known):
        return []  # without an import of torch
    from actmat.cli.catalog import describe
    from actmat.methods import all_methods

    return [describe(m) for m in all_methods() if m.name not in known]


def _one(name: str) -> dict[str, Any]:
    """Declaration of a method in a user's file or from another distribution."""
    from actmat.cli.catalog import describe
    from actmat.methods import get_method

    return describe(get_method(name))


def _table(chosen: list[dict[str, Any]]) -> None:
    from actmat.cli.catalog import shown

    table = plain_table("method", "data?", "low rank", "GFLOP", "idea")
    for m in chosen:
        data, low_rank = ", ".join(m["needs"]["data"]) or "-", "exact" if m["low_rank"] else "dense"
        table.add_row(m["name"], data, low_rank, shown(m["gflop"]), m["summary"])
    console.print(table)
    console.print("\n'actmat methods NAME' shows one in full. GFLOP: four experts of a 4096 x 4096 layer.")


def _show(m: dict[str, Any]) -> None:
    from rich.markdown import Markdown

    from actmat.cli.catalog import shown

    console.print(f"[bold]{m['name']}[/bold]: {m['summary']}\n")
    if m["equation"]:
        console.print("".join(f"    {line}\n" for line in m["equation"].splitlines()), markup=False)
    if m["notes"]:
        with console.capture() as shown_notes:
            console.print(Markdown(m["notes"]))
        lines = [line.rstrip() for line in shown_notes.get().splitlines()]  # rich pads lines with spaces
        console.print("\n".join([*lines, ""]), markup=False, highlight=False)
    acts = {"matrix": "matrices (linear layers)", "tensor": "whole tensors", "elementwise": "entries"}
    preset = f"; a preset of {m['preset_of']}" if m["preset_of"] else ""
    console.print(f"acts on {acts[m['acts_on']]}{preset}")
    needs = m["needs"]
    data = ", ".join(needs["data"]) or "nothing (data-free)"
    answers = {"weights": needs["takes_weights"], "base weights": needs["base"], "random": needs["random"]}
    words = {need: "yes" if answer else "no" for need, answer in answers.items()}
    if needs["weights_need_overlap"]:
        words["weights"] = "where row spaces overlap"
    console.print(f"needs from data: {data}; {'; '.join(f'{need}: {word}' for need, word in words.items())}")
    console.print(f"cost: {shown(m['gflop'])} GFLOP for four experts of a 4096 x 4096 layer")
    console.print(f"laws: {', '.join(m['laws']) or 'none'}")
    console.print(f"source: {m['source'] or 'none'}\n", markup=False)
    if not m["options"]:
        console.print("no options")
    for o in m["options"]:
        bounds = f", in {o['bounds']}" if o["bounds"] else ""
        console.print(f"  [bold]{o['name']}[/bold]  [dim]{o['type']}, default {o['default']!r}{bounds}[/dim]")
        if o["description"]:
            console.print(f"      {o['description']}", markup=False)
