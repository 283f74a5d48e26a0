"""The page of a diagnosis."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import quote

from actmat.diagnostics.model import Diagnosis
from actmat.extras.pages.html.environment import render, write_document
from actmat.extras.pages.html.measures import norms, overlap, residuals, rounding, spectra
from actmat.extras.pages.html.tensors import tensors
from actmat.extras.pages.html.verdicts import BAR_END, expert_rows, explanation, summary
from actmat.recipe.load import printable_yaml

SLOWEST = 8
"""Tensors that are listed with their times."""


def render_html(diagnosis: Diagnosis) -> str:
    """The report of a diagnosis as one HTML page; the same diagnosis gives the same page.

    Sections whose numbers the diagnosis does not have are left out.
    """
    recipe = printable_yaml({k: v for k, v in diagnosis.recipe.items() if k != "out"})
    table, left_out = tensors(diagnosis)
    measured = {}
    if diagnosis.measures:
        parts = {"layers": residuals, "overlap": overlap, "spectra": spectra, "norms": norms, "rounding": rounding}
        measured = {name: part(diagnosis) for name, part in parts.items()}
    return render(
        "report.html",
        d=diagnosis,
        s=summary(diagnosis),
        experts=expert_rows(diagnosis),
        measured=measured,
        table=table,
        left_out=left_out,
        slowest=sorted((t for t in diagnosis.tensors if t.seconds), key=lambda t: -(t.seconds or 0))[:SLOWEST],
        recipe=recipe,
        download="data:application/yaml;charset=utf-8," + quote(recipe.encode("utf-8", "replace")),
        place=shlex.quote(diagnosis.out or "merged"),
        explanation=explanation,
        bar_end=BAR_END,
    )


def write_html(diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write the report of a diagnosis to a file; errors as of `write_document`."""
    return write_document(render_html(diagnosis), path)
