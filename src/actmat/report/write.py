"""Write a diagnosis: `report.json` and, drawn from it, `report.html`."""

from __future__ import annotations

import os
from pathlib import Path

from actmat.diagnostics.model import Diagnosis, write_diagnosis

__all__ = ["write_report"]


def write_report(diagnosis: Diagnosis, path: str | Path) -> list[Path]:
    """Write one file if its name ends in .html (the page) or .json, else both into a directory, which is made.

    Returns the written files; each is whole or not there. Raises OSError.
    """
    from actmat.extras.pages.html import write_html

    file = Path(path)
    if os.path.isdir(file) or file.suffix not in (".html", ".json"):
        file.mkdir(parents=True, exist_ok=True)
        return [write_diagnosis(diagnosis, file), write_html(diagnosis, file / "report.html")]
    return [write_html(diagnosis, path) if file.suffix == ".html" else write_diagnosis(diagnosis, path)]
