"""The page of a comparison of two merges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actmat.report.comparison import Comparison, TensorDifference
from actmat.report.html.charts import Cell, largest_strips, strips
from actmat.report.html.document import document, write_document
from actmat.report.html.elements import (
    Child,
    Markup,
    bullets,
    caveat,
    columns_table,
    el,
    join,
    plural,
    section,
    shape_text,
    stacked_table,
    tensor_link,
    tiles,
)
from actmat.report.html.figures import TENTHS, figure, heat_legend
from actmat.report.html.layers import kind_of_name
from actmat.report.html.scales import number, residual_text
from actmat.report.html.tensors import Column, big_table
from actmat.version import __version__

__all__ = ["render_comparison", "write_comparison"]

MOST_TENSORS = 10
MOST_KINDS = 14
NUMBERS = ("relative", "cosine", "distance", "‖D‖ first", "‖D‖ second")


def render_comparison(comparison: Comparison) -> str:
    """Two merges side by side as one HTML page; the same comparison gives the same page."""
    sections = [
        ("summary", "Summary", _summary(comparison)),
        ("settings", "Recipes", _settings(comparison)),
        ("experts", "Residuals", _residuals(comparison)),
        ("checks", "Checks", _checks(comparison)),
        ("layers", "Layers", _layers(comparison)),
        ("tensors", "Tensors", _tensors(comparison)),
    ]
    first, second = comparison.outs
    subtitle = join([el("code", first), " (first) and ", el("code", second), " (second)"])
    made = f"Made by actmat {__version__} from the outputs and their manifests."
    return document("Two merges compared", subtitle, sections, made=made)


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page to a file; errors as of `write_document`."""
    return write_document(render_comparison(comparison), path)


def _summary(comparison: Comparison) -> Markup:
    differing = comparison.differing
    onto = f" of {comparison.base}" if comparison.base else ""
    said = [
        f"Both merge the same {plural(len(comparison.experts), 'expert')}{onto}: "
        f"{', '.join(a if a == b else f'{a} (in the second {b})' for a, b in comparison.experts)}.",
        f"The first uses {comparison.methods[0]}, the second {comparison.methods[1]}."
        if comparison.methods[0] != comparison.methods[1]
        else f"Both use {comparison.methods[0]}.",
        f"{len(differing):,} of {plural(len(comparison.tensors), 'tensor')} differ."
        if differing
        else "All tensors are the same, to the last bit.",
    ]
    if comparison.relative is not None:
        said.append(
            f"Where they differ, they are {number(comparison.relative)} of the mean size of their changes apart "
            "(0: the same; 2: as far as changes of these sizes can be)."
        )
    entries = [
        (f"{len(comparison.tensors):,}", "tensors compared", ""),
        (f"{len(differing):,}", "differ", ""),
        (f"{len(comparison.tensors) - len(differing):,}", "are the same", ""),
        (number(comparison.relative), "relative distance", ""),
    ]
    notes = [el("p", f"{n[:1].upper()}{n[1:]}.", class_="caveat") for n in comparison.notes]
    return section("summary", "Summary", bullets(said), tiles(entries), *notes)


def _settings(comparison: Comparison) -> Markup:
    rows = [[s.field, _value(s.first), _value(s.second)] for s in comparison.settings]
    table = stacked_table(["field", "first", "second"], rows, caption="What differs in the recipes")
    shown = table if rows else el("p", "The recipes, versions and devices agree.")
    lead = "What was asked for differently. A dash: left at its default."
    return section("settings", "Recipes", shown, lead=lead)


def _value(value: Any) -> Child:
    if value is None:
        return "–"
    return el("code", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _residuals(comparison: Comparison) -> Markup | None:
    if not comparison.residuals:
        return None
    rows = [
        [r.expert, residual_text(r.first), residual_text(r.second), f"{r.second - r.first:+.2f}".replace("-", "−")]
        for r in comparison.residuals
    ]
    table = columns_table(["expert", "first", "second", "second − first"], rows, caption="Residual ρ by expert")
    return section(
        "experts",
        "Residuals",
        table,
        caveat(),
        lead="How near each merge comes to each expert, on the directions that the expert changed: ρ = 0 is as the "
        "expert, ρ = 1 as the base.",
    )


def _checks(comparison: Comparison) -> Markup | None:
    if not all(comparison.diagnosed):
        return None
    rows = [[join([el("code", c.code), " ", c.title]), c.first or "–", c.second or "–"] for c in comparison.checks]
    table = stacked_table(["check", "first", "second"], rows, caption="Checks that differ")
    return section("checks", "Checks", table if rows else el("p", "All checks say the same of both."))


def _layers(comparison: Comparison) -> Markup | None:
    """The tensors that differ most, and a heat map of depth x kind where relative distances are known."""
    differing = comparison.differing
    if not differing:
        return None
    rows = [[tensor_link(t.name), *map(number, _numbers(t))] for t in differing[:MOST_TENSORS]]
    top = stacked_table(["tensor", *NUMBERS], rows, caption="Tensors that differ most")
    return section(
        "layers",
        "Where they differ",
        figure(f"The {len(rows)} tensors that differ most", top),
        _heat(comparison.tensors),
        lead="Relative: the distance between the merged weights over the mean size of the two merged changes. 0 is the "
        "same, 1 as far apart as a change is long; more than 2 is impossible.",
    )


def _numbers(t: TensorDifference) -> tuple[float | None, ...]:
    """Values of `NUMBERS`."""
    return (t.relative, t.cosine, t.distance, *(t.norms or (None, None)))


def _heat(tensors: Sequence[TensorDifference]) -> Markup | None:
    kinds: dict[str, list[TensorDifference]] = {}
    for t in tensors:
        if t.depth is not None and (t.same or t.relative is not None) and len(t.shape) > 1:
            kinds.setdefault(kind_of_name(t.name), []).append(t)
    depths = sorted({t.depth for ts in kinds.values() for t in ts if t.depth is not None})
    if len(depths) < 2:
        return None
    rows = largest_strips(
        sorted(kinds.items(), key=lambda kind: -max(map(_far, kind[1])))[:MOST_KINDS],
        depths,
        depth=lambda t: t.depth,
        value=_far,
        cell=lambda t: Cell(_level(_far(t)), f"{t.name}: {number(_far(t))}"),
        text=number,
    )
    legend = heat_legend(TENTHS, "0, the same", "1", ("h0", "above 1"), ("h1", "above 1.5"))
    return figure(
        "Relative distance by layer",
        legend,
        strips(rows, [str(d) for d in depths], x_title="layer", total_title="largest"),
        note="Kinds of matrices, the most different first.",
    )


def _far(t: TensorDifference) -> float:
    return 0.0 if t.same or t.relative is None else t.relative


def _level(relative: float) -> str:
    if relative >= 1:
        return "h1" if relative >= 1.5 else "h0"
    return f"q{int(10 * relative)}"


def _tensors(comparison: Comparison) -> Markup:
    rows = comparison.tensors
    values = [(0.0, *_numbers(t)[1:]) if t.same else _numbers(t) for t in rows]
    columns = [
        Column("tensor", "name", [t.name for t in rows]),
        Column("shape", "text", [shape_text(t.shape) for t in rows]),
        Column("first", "choice", [t.actions[0] for t in rows]),
        Column("second", "choice", [t.actions[1] for t in rows]),
        Column("stored", "choice", ["same" if t.same else "differ" for t in rows]),
        *(Column(title, "number", [v[i] for v in values]) for i, title in enumerate(NUMBERS)),
    ]
    return section(
        "tensors",
        "Every tensor",
        big_table(columns, caption="Every tensor and how far the two merges are apart there"),
        lead="In the order of the output. What both stored with the same bytes was not read.",
    )
