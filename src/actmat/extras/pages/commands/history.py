"""`actmat inspect --history`: merges in some folders, their inputs, and the differences of two."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from actmat.extras.pages.history import Changes, Found, PastMerge


def show_history(folders: Sequence[Path], contains: str | None, made: Path | None, *, json: bool, quiet: bool) -> None:
    """Print the merges in some folders, or the differences of two.

    Args:
        folders: to search; two merges are compared.
        contains: only merges of this expert: name, folder, hub id or hash.
        made: only merges that wrote this file; their recipes are printed.

    Raises:
        typer.Exit: with 1, where `contains` or `made` finds no merge.
    """
    from actmat.cli.screen import print_result
    from actmat.extras.pages.history import changes_between, find_merges, made_by

    if contains is not None and made is not None:
        raise typer.BadParameter("give --contains or --made, not both")
    found = find_merges(folders)
    merges: Sequence[PastMerge] = found.merges
    between = _two(folders, merges) if contains is None and made is None else None
    changes = None if between is None else changes_between(*between)
    if contains is not None:
        merges = [m for m in merges if m.contains(contains)]
    if made is not None:
        merges = made_by(merges, made)
    if json:
        rows = [m.to_json() | ({"recipe": m.manifest["recipe"]} if made else {}) for m in merges]
        skipped = [{"place": str(place), "reason": reason} for place, reason in found.unreadable]
        changed = {} if changes is None else {"changes": changes.to_json()}
        print_result("history", {"merges": rows, "unreadable": skipped, **changed})
    elif not quiet:
        _print(merges, found, changes, recipes=made is not None)
    if (contains is not None or made is not None) and not merges:
        raise typer.Exit(1)


def _two(folders: Sequence[Path], merges: Sequence[PastMerge]) -> tuple[PastMerge, PastMerge] | None:
    """The two merges that were named, in the order of the command line; None where folders were."""
    places = {m.place: m for m in merges}
    if len(folders) != 2 or any(f not in places for f in folders):
        return None
    return places[folders[0]], places[folders[1]]


def _print(merges: Sequence[PastMerge], found: Found, changes: Changes | None, *, recipes: bool) -> None:
    from actmat.cli.screen import console, escape, plain_table
    from actmat.recipe.load import printable_yaml

    if changes is not None:
        _print_changes(changes)
    elif merges:
        table = plain_table("finished", "method", "experts", "merge")
        for m in merges:
            row = m.to_json()
            names = ", ".join(e["name"] for e in row["experts"])
            table.add_row(row["finished"][:16].replace("T", " "), *map(escape, (row["method"], names, row["place"])))
        console.print(table)
    else:
        console.print(f"no such merge among {len(found.merges)}")
    for m in merges if recipes else ():
        console.print(f"\n[bold]{escape(m.place)}[/bold]")
        console.print(printable_yaml(m.manifest["recipe"]).rstrip(), markup=False)
    for place, reason in found.unreadable:
        console.print(f"[yellow]not read[/yellow]: {escape(place)}: {escape(reason)}")


def _print_changes(changes: Changes) -> None:
    """Experts, then the recipe, then what that changed."""
    from actmat.cli.screen import console, escape

    for word, names in (("added", changes.added), ("removed", changes.removed), ("changed", changes.changed)):
        for name in names:
            console.print(f"expert {word}: {escape(name)}")
    for field, (before, after) in changes.recipe.items():
        console.print(f"{escape(field)}: {escape(_short(before))} -> {escape(_short(after))}")
    for package, (before, after) in changes.versions.items():
        console.print(f"version of {escape(package)}: {escape(_short(before))} -> {escape(_short(after))}")
    differing, common, single = changes.tensors
    only = f"; {single} are only in one of them" if single else ""
    console.print(
        f"{differing} of {common} tensors differ{only}" if differing or single else "all tensors are the same"
    )


def _short(value: Any) -> str:
    return "default" if value is None else value if isinstance(value, str) else json_text(value, ensure_ascii=False)
