"""`actmat report`: draw a report.json as a page for the browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags

__all__ = ["report"]


def report(
    place: Annotated[
        Path, typer.Argument(metavar="OUT|REPORT.json", help="A merge made with --diagnose, or a report.json.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="File to write (default: report.html next to report.json).")
    ] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Draw report.json as one HTML page, which opens from disk and needs no network.

    actmat report merged --html pages/merged.html
    actmat report report.json

    Nothing is measured again. 'actmat merge --diagnose' writes this page next to
    report.json; this command is for a report.json that came without it, and to
    write the page elsewhere.
    """
    from actmat.checkpoints.writing.staging import disk_errors
    from actmat.cli.screen import console, escape
    from actmat.diagnostics.model import read_diagnosis
    from actmat.extras.pages.html import write_html

    found = read_diagnosis(place)
    folder = place if os.path.isdir(place) else place.parent
    out = folder / "report.html" if html is None else html
    with disk_errors(out.parent):
        write_html(found, out)
    if json:
        from actmat.cli.results import print_result

        print_result("report", {"html": str(out), "experts": len(found.experts), "tensors": len(found.tensors)})
    elif not quiet:
        console.print(f"{escape(out)}  ({len(found.experts)} experts, {len(found.tensors)} tensors)")
