"""End of the report: where time and memory went, every tensor, how to make the merge again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import yaml

from actmat.diagnostics.model import Diagnosis
from actmat.errors import format_size
from actmat.report.html.markup import Child, Markup, el
from actmat.report.html.overview import section, tensor_link, tiles
from actmat.report.html.scales import number

__all__ = ["code_block", "cost", "recipe", "recipe_text"]

SLOWEST = 8


def cost(diagnosis: Diagnosis) -> Markup:
    """Time by stage, memory, traffic, slowest tensors."""
    totals = diagnosis.totals
    known = [
        (f"{totals.seconds:,.1f} s" if totals.seconds is not None else None, "from start to end"),
        (format_size(totals.peak_bytes) if totals.peak_bytes is not None else None, "peak memory"),
        (format_size(totals.bytes_read) if totals.bytes_read is not None else None, "read"),
        (format_size(totals.bytes_written) if totals.bytes_written is not None else None, "written"),
    ]
    slow = sorted((t for t in diagnosis.tensors if t.seconds), key=lambda t: -(t.seconds or 0))[:SLOWEST]
    slowest: Child = None
    if slow:
        items = (el("li", tensor_link(t.name), f" {number(t.seconds)} s") for t in slow)
        slowest = el("details", el("summary", "Slowest tensors"), el("ol", *items))
    measuring = totals.stages.measure
    said = f"Measuring for this report: {number(measuring)} s of all workers; other stages were not timed apart."
    timed = el("p", said) if measuring else None
    return section(
        "cost",
        "Time and memory",
        tiles((v, w, "") for v, w in known if v is not None),
        timed,
        slowest,
        lead="Stages count the seconds of all workers together; they may add up to more than the time that passed.",
    )


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """The recipe as YAML that `actmat merge` reads; the place of the output is given on the command line."""
    fields = {k: v for k, v in recipe.items() if k != "out"}
    return str(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=100))


def code_block(text: str) -> Markup:
    """Text to copy, with a button where the script runs."""
    button = el("button", "Copy", type="button", class_="copy", hidden=True)
    return el("div", el("pre", el("code", text), tabindex="0"), button, class_="code")


def recipe(diagnosis: Diagnosis) -> Markup:
    """The recipe, and the command that makes the same merge from it."""
    text = recipe_text(diagnosis.recipe)
    place = shlex.quote(diagnosis.out or "merged")
    address = "data:application/yaml;charset=utf-8," + quote(text.encode("utf-8", "replace"))
    file, merge = el("code", "recipe.yaml"), f"actmat merge recipe.yaml --out {place}"
    download = el("a", "download", href=address, download="recipe.yaml")
    steps = [
        el("li", "Save the recipe as ", file, " (", download, "):", code_block(text)),
        el("li", "Install ", el("code", f"actmat {diagnosis.actmat}"), " and run:", code_block(merge)),
        el("li", "Compare with what is on record:", code_block(f"actmat verify {place}")),
    ]  # fmt: skip
    return section(
        "recipe",
        "Make it again",
        el("ol", *steps, class_="steps"),
        lead="Same recipe, same inputs, same version: the same bytes on CPU. Paths are those of the machine that made "
        "this report.",
    )
