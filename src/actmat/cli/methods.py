"""`actmat methods`: list the merge methods from their declarations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, plain_table, print_result

if TYPE_CHECKING:
    from actmat.methods import MergeMethod


@command("choose", "listed", "unknown method", imports_torch=True)
def methods(
    name: Annotated[str | None, typer.Argument(help="Method to show in full, such as ties.")] = None,
    shown: flags.OutputFlags = flags.USUAL,
) -> None:
    """List the merge methods; with a NAME, its equation, options, defaults, needs and reference."""
    from actmat.methods import all_methods, get_method

    if name == "auto":
        raise typer.BadParameter("auto is one of the methods, by your experts: 'actmat plan' names it, and says why")
    chosen = [_described(m) for m in (all_methods() if name is None else [get_method(name)])]
    if shown.json:
        short = ("name", "summary", "needs", "low_rank")
        rows = chosen if shown.full or name is not None else [{key: m[key] for key in short} for m in chosen]
        print_result("methods", {"methods": rows})
    elif shown.quiet:
        return
    elif name is None:
        _table(chosen)
    else:
        _show(chosen[0])


def _described(m: MergeMethod) -> dict[str, Any]:
    """A declaration as plain data."""
    return {
        "name": m.name,
        "summary": m.text.summary,
        "equation": m.text.equation,
        "acts_on": m.acts_on,
        "needs": {"data": list(m.needs_statistics), "base": m.needs_base}
        | {"takes_weights": m.is_weighted, "weights_need_overlap": m.meets_all(m.resolve_options({}))}
        | {"random": m.is_random},
        "low_rank": m.lowrank is not None,
        "preset_of": m.preset_of,
        "laws": sorted(m.laws),
        "notes": m.text.notes,
        "source": m.text.source,
        "options": [
            {"name": o.name, "type": o.type_name, "default": o.default}
            | {"bounds": str(o.bounds) if o.bounds else None, "description": o.doc}
            for o in m.options.values()
        ],
    }


def _table(chosen: Sequence[dict[str, Any]]) -> None:
    table = plain_table("method", "data?", "low rank", "idea")
    for m in chosen:
        data, low_rank = ", ".join(m["needs"]["data"]) or "-", "exact" if m["low_rank"] else "dense"
        table.add_row(m["name"], data, low_rank, m["summary"])
    console.print(table)
    console.print("\n'actmat methods NAME' shows one in full.")


def _show(m: dict[str, Any]) -> None:
    from rich.markdown import Markdown

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
    console.print(f"laws: {', '.join(m['laws']) or 'none'}")
    console.print(f"source: {m['source'] or 'none'}\n", markup=False)
    if not m["options"]:
        console.print("no options")
    for o in m["options"]:
        bounds = f", in {o['bounds']}" if o["bounds"] else ""
        console.print(f"  [bold]{o['name']}[/bold]  [dim]{o['type']}, default {o['default']!r}{bounds}[/dim]")
        if o["description"]:
            console.print(f"      {o['description']}", markup=False)
