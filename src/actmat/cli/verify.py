"""`actmat verify`: compare a merged model and its inputs with the manifest."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.data import InputFlags
from actmat.cli.flags import FlagFields
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, print_result
from actmat.settings import RunSettings


@command("look", "everything matches", "something differs, or the merge is not finished")
def verify(
    *,
    out: Annotated[str, typer.Argument(help="Directory of a merged model, or its URL.")],
    inputs: Annotated[bool, typer.Option("--inputs/--no-inputs", help="Also check base and experts.")] = True,
    against: Annotated[
        list[str] | None, typer.Option(help="Adapter that was added to the base, once per expert: add it again.")
    ] = None,
    asked: Annotated[InputFlags, FlagFields(without=("data", "keep_statistics", "tune_scale"))],
    shown: flags.JsonQuiet,
) -> None:
    """Hash every tensor and file of a merged model, and its inputs, and compare with actmat_manifest.json.

    actmat verify MERGED
    actmat verify MERGED --against ADAPTER
    actmat verify MERGED --check math=math.jsonl --check code=code.jsonl

    Lists all differences, and content that could not be checked. --against
    adds the adapter to the base again, compares every tensor with the merged
    model, and says how much of the delta was lost in rounding. --check asks
    the models, and prints the share of each expert's answers that was kept.
    """
    from actmat.api.verifying import verify as compare
    from actmat.cli.searching import compare_answers

    result = compare(out, inputs=inputs, against=against or ())
    asked, quiet = dataclasses.replace(asked, data=asked.check), shown.quiet or shown.json
    rows = compare_answers(out, asked, run=RunSettings(), quiet=quiet) if asked.data else ()
    if shown.json:
        names = ("ok", "tensors", "files", "inputs", "problems", "unchecked")
        added: dict[str, Any] = {} if result.added is None else {"added": result.added.to_json()}
        added |= {"answers": [dataclasses.asdict(row) for row in rows]} if rows else {}
        print_result("verify", {"out": out} | {name: getattr(result, name) for name in names} | added)
    if shown.json or (shown.quiet and result.ok):
        raise typer.Exit(0 if result.ok else 1)
    if rows:
        from actmat.cli.summary import print_kept

        print_kept(rows)
    for problem in result.problems:
        console.print(f"[red]differs[/red]: {escape(problem)}")
    for part in result.unchecked:
        console.print(f"[yellow]not checked[/yellow]: {escape(part)}")
    for line in result.added.lines() if result.added is not None else ():
        console.print(escape(line))
    checked = f"{result.tensors} tensors of {out}" + (f", inputs {', '.join(result.inputs)}" if result.inputs else "")
    if not result.ok:
        console.print(f"{len(result.problems)} difference(s); checked {escape(checked)}")
        raise typer.Exit(1)
    console.print(f"[green]intact[/green]: {escape(checked)}")
