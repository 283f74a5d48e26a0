"""Write a diagnosis: `report.json` and, drawn from it, `report.html`."""

from __future__ import annotations

import os
from pathlib import Path

from actmat.diagnostics.model import Diagnosis, write_diagnosis

__all__ = ["write_report"]


def write_report(diagnosis: Diagnosis, path: str | Path) -> list[Path]:
    """Write both files into a directory, or one file: the page if its name ends in .html, else the JSON.

    Returns the written files; each is whole or not there. Raises OSError.
    """
    from actmat.report.html import write_html

    file = Path(path)
    if os.path.isdir(file):
        return [write_diagnosis(diagnosis, file), write_html(diagnosis, file / "report.html")]
    return [write_html(diagnosis, path) if file.suffix == ".html" else write_diagnosis(diagnosis, path)]
