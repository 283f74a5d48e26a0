"""`actmat report`: a report.json as a page for the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    place: Annotated[
        Path, typer.Argument(metavar="OUT|REPORT.json", help="A merge made with --diagnose, or a report.json.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="File to write (default: report.html beside report.json).")
    ] = None,
) -> None:
    """Draw report.json as one HTML page that opens from disk, needs no network and can be sent to somebody.

    actmat report merged --html pages/merged.html
    actmat report report.json

    Nothing is measured again: the page shows what report.json holds. 'actmat merge --diagnose' writes the page beside
    report.json itself; this is for a report.json that came without it, and for another place.
    """
    from actmat.checkpoints.writing.staging import disk_errors
    from actmat.cli.screen import console
    from actmat.diagnostics.model import read_diagnosis
    from actmat.report.html import write_html

    found = read_diagnosis(place)
    folder = place if place.is_dir() else place.parent
    out = folder / "report.html" if html is None else html
    with disk_errors(out.parent):
        write_html(found, out)
    console.print(f"{out}  ({len(found.experts)} experts, {len(found.tensors)} tensors)", markup=False)
