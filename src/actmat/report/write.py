"""Write a diagnosis: `report.json` and, drawn from it, `report.html`."""

from __future__ import annotations

import os
from pathlib import Path

from actmat.diagnostics.model import Diagnosis, write_diagnosis
from actmat.errors import MergeError
from actmat.plugins import load


def write_report(diagnosis: Diagnosis, path: str | Path) -> list[Path]:
    """Write one file if its name ends in .html (the page) or .json, else both into a directory, which is made.

    The page is written by a plug-in; without one, a directory gets `report.json` only.

    Returns:
        The written files; each is whole or not there.

    Raises:
        MergeError: a page is wanted and no plug-in writes one.
        OSError: writing failed.
    """
    write_page = load("actmat.reports", "html")
    file = Path(path)
    if os.path.isdir(file) or file.suffix not in (".html", ".json"):
        file.mkdir(parents=True, exist_ok=True)
        page = [] if write_page is None else [write_page(diagnosis, file / "report.html")]
        return [write_diagnosis(diagnosis, file), *page]
    if file.suffix == ".json":
        return [write_diagnosis(diagnosis, file)]
    if write_page is None:
        raise MergeError(
            f"{file} cannot be written: no plug-in writes pages here (entry points 'actmat.reports'). Fix: "
            "pip install --force-reinstall actmat, or write a .json file."
        )
    return [write_page(diagnosis, file)]
