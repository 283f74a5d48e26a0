"""The page of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actmat.diagnostics.model import Diagnosis
from actmat.report.html.checks import checks
from actmat.report.html.document import document, write_document
from actmat.report.html.experts import experts
from actmat.report.html.markup import Markup, el, join
from actmat.report.html.overlap import overlap
from actmat.report.html.reproduction import cost, recipe
from actmat.report.html.residuals import residuals
from actmat.report.html.sizes import norms, rounding
from actmat.report.html.spectra import spectra
from actmat.report.html.summary import summary
from actmat.report.html.tensors import tensors
from actmat.report.html.words import plural

__all__ = ["render_html", "write_html"]

Section = tuple[str, str, Callable[[Diagnosis], Markup | None]]

VERDICTS: tuple[Section, ...] = (
    ("summary", "Summary", summary),
    ("experts", "Experts", experts),
    ("checks", "Checks", checks),
)
MEASURES: tuple[Section, ...] = (
    ("layers", "Layers", residuals),
    ("overlap", "Overlap", overlap),
    ("spectra", "Spectra", spectra),
    ("norms", "Size", norms),
    ("rounding", "Rounding", rounding),
)
RECORD: tuple[Section, ...] = (("cost", "Cost", cost), ("tensors", "Tensors", tensors), ("recipe", "Recipe", recipe))


def render_html(diagnosis: Diagnosis) -> str:
    """The report of a diagnosis as one HTML page; the same diagnosis gives the same page.

    Sections whose numbers the diagnosis does not have are left out.
    """
    shown = [*VERDICTS, *(MEASURES if diagnosis.measures else ()), *RECORD]
    title = "Diagnosis of a merge" if diagnosis.source == "diagnose" else "Merge report"
    names = join([el("code", diagnosis.method), f" over {plural(len(diagnosis.experts), 'expert')}"])
    onto = join([" of ", el("code", diagnosis.base)]) if diagnosis.base else None
    into = join([" into ", el("code", diagnosis.out)]) if diagnosis.out else None
    return document(
        title,
        join([names, onto, into]),
        [(anchor, short, section(diagnosis)) for anchor, short, section in shown],
        made=f"Made by actmat {diagnosis.actmat} from report.json, {diagnosis.created}.",
    )


def write_html(diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write the report of a diagnosis to a file; errors as of `write_document`."""
    return write_document(render_html(diagnosis), path)
