"""`actmat push`: publish a finished output on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, hub_bars, plain_table, print_result
from actmat.cli.streams import optional_stdout
from actmat.errors import format_size

if TYPE_CHECKING:
    from actmat.api.pushing import PushReport


@command("share", "sent, or listed with `--dry-run`", "the merge is not finished, or the hub rejects it")
def push(
    out: Annotated[Path, typer.Argument(help="Directory of a merged model or adapter.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the hub; created if missing.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public (default: private).")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another output in the repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files and sizes; send nothing.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Hash the output again before sending it.")] = True,
    shown: flags.JsonQuiet = flags.USUAL,
) -> None:
    """Send a merged model to the Hugging Face hub, with its card and manifest.

    actmat push MERGED org/name
    actmat push MERGED org/name --dry-run

    The repository is private unless --public is given. All files appear in one
    commit. Files that the hub already has are not sent again: to continue an
    interrupted push, repeat the command. First log in: hf auth login.
    """
    from actmat.api.pushing import push as send

    with hub_bars(quiet=shown.quiet or shown.json):
        report = send(out, repo, public=public, overwrite=overwrite, dry_run=dry_run, check=check)
    with optional_stdout("The push is complete." if report.url else ""):
        if shown.json:
            print_result("push", dataclasses.asdict(report))
        elif not shown.quiet:
            _print(report, out)


def _print(report: PushReport, out: Path) -> None:

    table = plain_table("file", "size", "", numbers=["size"])
    for file in report.files:
        table.add_row(escape(file.name), format_size(file.size), {"same": "is there"}.get(file.state, file.state))
    for name in report.removed:
        table.add_row(escape(name), "", "removed")
    console.print(table)
    place = f"{'private' if report.private else 'public'}{', new' if report.is_new else ''}"
    would = "sent" if report.url else "to send"
    console.print(f"[bold]{escape(report.repo_id)}[/bold] ({place}): {format_size(report.nbytes)} {would}")
    if report.left_out:
        console.print(f"  not sent, because they are not files of the merge: {escape(', '.join(report.left_out))}")
    for note in report.notes:
        console.print(f"  note: {escape(note)}")
    if report.url:
        console.print(f"  {escape(report.url)}")
        console.print(f"  use it as an input: hf://{escape(report.repo_id)}")
    else:
        console.print(f"  nothing was sent (--dry-run): actmat push {escape(out)} {escape(report.repo_id)}")
