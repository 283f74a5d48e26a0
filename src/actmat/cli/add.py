"""`actmat add`: a finished merge with further experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.recipes import experts_of
from actmat.cli.signature import Fields
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.growing import GrowthReport

__all__ = ["NewOut", "Running", "add", "tell"]

NewOut = Annotated[
    Path | None,
    typer.Option("--out", help="Where the new output goes (default: it replaces OUT when it is complete)."),
]
Running = Annotated[RunSettings, Fields(only=("max_memory", "threads", "durable", "sha256"))]


def add(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A finished merge; best one made with --keep-sums.")],
    expert: Annotated[
        list[str], typer.Option("--expert", "-e", help="The expert to add; once per expert. NAME=PATH gives it a name.")
    ],
    *,
    weight: Annotated[
        list[float] | None, typer.Option("--weight", "-w", help="Weight of an expert, once per --expert.")
    ] = None,
    new_out: NewOut = None,
    run: Running,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Add an expert to a finished merge.

    actmat merge -b BASE -e math -e code -m average --keep-sums --out OUT
    actmat add OUT -e law                      (OUT is replaced when it is done)
    actmat add OUT -e law=PATH --out OUT2      (OUT stays)

    The output has the bytes of a merge of all experts, the new one last. With
    sums that 'merge --keep-sums' kept, only the base, the sums and the new expert
    are read: the earlier experts may be gone. Without, all experts are read again.
    """
    from actmat.cli.screen import showing_progress
    from actmat.growing import add_experts

    with showing_progress(quiet=quiet or json) as progress:
        report = add_experts(out, experts_of(expert, weight), to=new_out, settings=run, progress=progress)
    tell("add", report, json=json, quiet=quiet)


def tell(command: str, report: GrowthReport, *, json: bool, quiet: bool) -> None:
    """Say what was merged, and what was read for it."""
    with optional_stdout("The merge is complete."):
        if json:
            from actmat.cli.results import merge_data, print_result

            how = {"from_sums": report.from_sums, "why_read": report.why_read}
            print_result(command, {**merge_data(report.merged), **how})
        elif not quiet:
            from actmat.cli.screen import console
            from actmat.cli.summary import print_summary

            print_summary(report.merged)
            told = "the earlier experts were not read: their sums were continued"
            console.print(f"  {told if report.from_sums else f'all experts were read: {report.why_read}'}")
