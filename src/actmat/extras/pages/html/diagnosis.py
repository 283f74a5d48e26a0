"""The page of a diagnosis."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from actmat.diagnostics.model import Diagnosis
from actmat.errors import format_size
from actmat.extras.pages.html.elements import (
    Markup,
    code_block,
    document,
    el,
    join,
    section,
    tensor_link,
    tiles,
    write_document,
)
from actmat.extras.pages.html.measures import norms, overlap, residuals, rounding, spectra
from actmat.extras.pages.html.scales import number
from actmat.extras.pages.html.tensors import tensors
from actmat.extras.pages.html.verdicts import checks, experts, summary
from actmat.recipe.load import printable_yaml
from actmat.report.words import plural

SLOWEST = 8


def cost(diagnosis: Diagnosis) -> Markup:
    """Time, memory, bytes read and written, slowest tensors."""
    totals = diagnosis.totals
    sizes = [(totals.peak_bytes, "peak memory"), (totals.bytes_read, "read"), (totals.bytes_written, "written")]
    entries = [(format_size(v), w, "") for v, w in sizes if v is not None]
    if totals.seconds is not None:
        entries.insert(0, (f"{totals.seconds:,.1f} s", "from start to end", ""))
    measuring = totals.stages.measure
    said = f"Measuring for this report: {number(measuring)} s of all workers; other stages were not timed apart."
    slow = sorted((t for t in diagnosis.tensors if t.seconds), key=lambda t: -(t.seconds or 0))[:SLOWEST]
    items = (el("li", tensor_link(t.name), f" {number(t.seconds)} s") for t in slow)
    return section(
        "cost",
        "Time and memory",
        tiles(entries),
        el("p", said) if measuring else None,
        el("details", el("summary", "Slowest tensors"), el("ol", *items)) if slow else None,
        lead="Stages count the seconds of all workers together; they may add up to more than the time that passed.",
    )


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """The recipe as YAML that `actmat merge` reads; the output is given on the command line."""
    fields = {k: v for k, v in recipe.items() if k != "out"}
    return printable_yaml(fields)


def recipe(diagnosis: Diagnosis) -> Markup:
    """The recipe, and the command that makes the same merge from it."""
    text = recipe_text(diagnosis.recipe)
    out = shlex.quote(diagnosis.out or "merged")
    address = "data:application/yaml;charset=utf-8," + quote(text.encode("utf-8", "replace"))
    file, merge = el("code", "recipe.yaml"), f"actmat merge recipe.yaml --out {out}"
    download = el("a", "download", href=address, download="recipe.yaml")
    steps = [
        el("li", "Save the recipe as ", file, " (", download, "):", code_block(text)),
        el("li", "Install ", el("code", f"actmat {diagnosis.actmat}"), " and run:", code_block(merge)),
        el("li", "Compare with what is on record:", code_block(f"actmat verify {out}")),
    ]  # fmt: skip
    return section(
        "recipe",
        "Make it again",
        el("ol", *steps, class_="steps"),
        lead="Same recipe, same inputs, same version: the same bytes on CPU. Paths are those of the machine that made "
        "this report.",
    )


Section = tuple[str, str, Callable[[Diagnosis], Markup | None]]

VERDICTS: tuple[Section, ...] = (
    ("summary", "Verdict", summary),
    ("checks", "Checks", checks),
    ("experts", "Experts", experts),
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
