"""`actmat finish`: make one output of the parts of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.streams import optional_stdout

__all__ = ["finish"]


def finish(
    out: Annotated[Path, typer.Argument(help="The --out of the parts.")],
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Hash every tensor again as it lies on the disk.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of actmat.")] = False,
    fsync: Annotated[
        bool, typer.Option("--fsync/--no-fsync", help="Wait until the output is on the disk before it appears.")
    ] = True,
    sha256: Annotated[bool, typer.Option("--sha256", help="Add SHA-256 of the weight files to the manifest.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Tensors hashed at the same time (default: all cores).")
    ] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Complete a merge that was made in parts ('actmat merge --part 3/16').

    Checks that all parts are there and that every tensor is on the disk as its
    part wrote it; writes index, config, model card and manifest; then the output
    gets its name. A part that is missing is named with the command that makes it.
    An output that is finished already is verified.
    """
    from actmat.cli.screen import console, escape
    from actmat.cli.summary import print_size
    from actmat.run.parts import finish_parts

    report = finish_parts(out, check=check, overwrite=overwrite, durable=fsync, sha256=sha256, threads=threads)
    with optional_stdout("The merge is complete."):
        if json:
            from actmat.cli.results import print_result, size_data

            fields = {name: getattr(report, name) for name in ("tensors", "parts", "was_finished")}
            seconds, size = round(report.seconds, 3), size_data(report.totals.norms)
            more = {"nonfinite": report.totals.nonfinite, "size": size, "seconds": seconds}
            print_result("finish", {"out": str(out), **fields, **more, "notes": list(report.notes)})
        if json or quiet:
            return
        if report.was_finished:
            console.print(f"{escape(out)} is complete: all its {report.tensors} tensors, and its inputs, are intact")
            print_size(report.totals.norms, out, warn=True)
            return
        console.print(f"[bold]{escape(out)}[/bold]: {report.tensors} tensors of {report.parts} parts")
        print_size(report.totals.norms, out, warn=True)
        for note in report.notes:
            console.print(f"  note: {escape(note)}")
        if report.totals.nonfinite:
            console.print(f"  note: {report.totals.nonfinite} NaN or Inf entries of experts were treated as unchanged")
        console.print("  all hashes in actmat_manifest.json")
