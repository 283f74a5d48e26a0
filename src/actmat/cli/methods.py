"""`actmat methods`: the merge methods, from their declarations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags

if TYPE_CHECKING:
    from actmat.methods import MergeMethod

__all__ = ["methods"]


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method in full.")] = None, json: flags.Json = False
) -> None:
    """List the merge methods; with a NAME, its equation, options, defaults, needs and reference."""
    from actmat.cli.screen import print_json
    from actmat.methods import METHODS, get_method

    chosen = [get_method(name)] if name else list(METHODS)
    if json:
        data = [_describe(m) for m in chosen]
        print_json(data[0] if name else data)
    elif name:
        _show(chosen[0])
    else:
        _table(chosen)


def _describe(m: MergeMethod) -> dict[str, Any]:
    return {
        "name": m.name,
        "summary": m.summary,
        "equation": m.equation,
        "acts_on": m.acts_on,
        "needs": {"data": list(m.needs_statistics), "base": m.needs_base}
        | {"takes_weights": m.is_weighted, "random": m.is_random},
        "low_rank": m.merge_lowrank is not None,
        "preset_of": m.preset_of,
        "flops": m.flops,
        "laws": sorted(m.laws),
        "reference": m.reference,
        "options": [
            {"name": o.name, "type": o.type_name, "default": o.default}
            | {"bounds": str(o.bounds) if o.bounds else None, "description": o.doc}
            for o in m.options.values()
        ],
    }


def _table(chosen: list[MergeMethod]) -> None:
    from actmat.cli.screen import console, plain_table

    table = plain_table("method", "data?", "low rank", "FLOPs", "idea")
    for m in chosen:
        low_rank = "exact" if m.merge_lowrank else "dense"
        table.add_row(m.name, ", ".join(m.needs_statistics) or "-", low_rank, m.flops or "-", m.summary)
    console.print(table)
    console.print("\n'actmat methods NAME' shows one in full. FLOPs: T deltas of N x N, leading term.")


def _show(m: MergeMethod) -> None:
    from actmat.cli.screen import console

    console.print(f"[bold]{m.name}[/bold]: {m.summary}\n")
    console.print(f"    {m.equation}\n", markup=False)
    acts = {"matrix": "matrices (linear layers)", "tensor": "whole tensors", "elementwise": "entries"}
    preset = f"; a preset of {m.preset_of}" if m.preset_of else ""
    console.print(f"acts on {acts[m.acts_on]}{preset}")
    data = ", ".join(m.needs_statistics) or "nothing: it is data-free"
    answers = {"weights": m.is_weighted, "base weights": m.needs_base, "random": m.is_random}
    yes_no = "; ".join(f"{need}: {'yes' if answer else 'no'}" for need, answer in answers.items())
    console.print(f"needs from data: {data}; {yes_no}")
    console.print(f"cost: {m.flops or 'linear in the number of entries'} FLOPs for T deltas of N x N")
    console.print(f"laws: {', '.join(sorted(m.laws)) or 'none'}")
    console.print(f"reference: {m.reference}\n", markup=False)
    if not m.options:
        console.print("no options")
    for o in m.options.values():
        bounds = f", in {o.bounds}" if o.bounds else ""
        console.print(f"  [bold]{o.name}[/bold]  [dim]{o.type_name}, default {o.default!r}{bounds}[/dim]")
        if o.doc:
            console.print(f"      {o.doc}", markup=False)
