"""`actmat compare`: show the differences between two merges of the same experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, counting, escape, plain_table, print_result

if TYPE_CHECKING:
    from actmat.extras.pages.comparison import MergeComparison

MOST = 10
"""Maximum number of listed tensors."""


@command("look", "compared, whether they differ or not", "not two merges of the same base and experts")
def compare(
    first: Annotated[Path, typer.Argument(metavar="OUT1", help="Directory of a merged model.")],
    second: Annotated[Path, typer.Argument(metavar="OUT2", help="Another merge of the same experts.")],
    shown: flags.OutputFlags,
) -> None:
    """Compare two merges of the same base and experts: recipes and weights.

    actmat compare merged-actmat merged-ties

    Reads the weights of both and of the base, a few megabytes at a time. Merges
    of different bases or experts are refused: all differences are listed and the
    exit code is 1.
    """
    from actmat.extras.pages.comparison import compare as compare_outputs

    with counting("comparing", quiet=shown.quiet) as seen:
        comparison = compare_outputs(first, second, progress=seen)
    if shown.json:
        print_result("compare", comparison.to_json(), long=("tensors",), full=shown.full)
    elif not shown.quiet:
        _print(comparison)


def _print(comparison: MergeComparison) -> None:
    first, second = comparison.names
    console.print(f"[bold]{escape(first)}[/bold]  {escape(comparison.outs[0])}  ({escape(comparison.methods[0])})")
    console.print(f"[bold]{escape(second)}[/bold]  {escape(comparison.outs[1])}  ({escape(comparison.methods[1])})")
    names = ", ".join(a if a == b else f"{a} = {b}" for a, b in comparison.experts)
    onto = f" of {comparison.base}" if comparison.base else ""
    console.print(f"{len(comparison.experts)} experts{escape(onto)}: {escape(names)}\n")
    _print_rows(["differs in", first, second], [d.row for d in comparison.settings])
    if not comparison.tensors:
        console.print(f"all {comparison.compared} tensors are the same\n")
        return
    differing = f"{len(comparison.tensors)} of {comparison.compared} tensors differ"
    console.print(f"{differing}; relative distance there {comparison.relative:.3g} (0 to 2)\n")
    numbers = [(t.name.removesuffix(".weight"), t.relative, *t.norms) for t in comparison.tensors[:MOST]]
    rows = [[name, *(f"{value:.3g}" for value in values)] for name, *values in numbers]
    _print_rows(["differ most", "relative", "norm 1", "norm 2"], rows)


def _print_rows(head: list[str], rows: list[list[str]]) -> None:
    """Print a table and an empty line, or nothing if there are no rows."""
    if rows:
        table = plain_table(*map(escape, head), numbers=head[1:] if len(head) != 3 else ())
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()
