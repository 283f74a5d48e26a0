"""Sections "Time and memory" and "Make it again"."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import yaml

from actmat.diagnostics.model import Diagnosis
from actmat.errors import format_size
from actmat.report.html.elements import code_block, section, tensor_link, tiles
from actmat.report.html.markup import Markup, el
from actmat.report.html.scales import number

__all__ = ["cost", "recipe", "recipe_text"]

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
    return str(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=100))


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
