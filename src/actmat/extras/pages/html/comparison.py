"""The page of a comparison of two merges."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actmat.extras.pages.comparison import Comparison, TensorDifference
from actmat.extras.pages.html.charts import Cell, HeatMap, largest_strips
from actmat.extras.pages.html.environment import render, shape_text, write_document
from actmat.extras.pages.html.measures import kind_of_name
from actmat.extras.pages.html.scales import HeatScale, number
from actmat.extras.pages.html.tensors import BigTable, Column
from actmat.extras.pages.html.verdicts import explanation
from actmat.report.words import IN_PLACES, size_words

MOST_TENSORS = 10
MOST_KINDS = 14
FURTHEST = 2.0
"""Relative distance at the end of a bar: no larger one exists."""
COLOURS = ("e0", "e1")
"""Of the first merge and of the second, in every figure."""


def render_comparison(comparison: Comparison) -> str:
    """Two merges side by side as one HTML page; the same comparison gives the same page."""
    top = comparison.differing[:MOST_TENSORS]
    both = zip(comparison.names, comparison.size_codes, strict=True)
    return render(
        "comparison.html",
        c=comparison,
        colours=COLOURS,
        sizes=_sizes(comparison),
        size_words=[(n, size_words(norms)) for n, norms in zip(comparison.names, comparison.totals, strict=True)],
        longer=_longer(comparison),
        issues=_issues(comparison),
        far_off=[(name, IN_PLACES.get(code, ""), code) for name, code in both if code is not None],
        end=max(1.0, *(v for r in comparison.residuals for v in (r.first, r.second)), 0.0),
        titles=_titles(comparison),
        top=top,
        longest=max((n for t in top for n in t.norms or ()), default=0.0) or 1.0,
        furthest=FURTHEST,
        heat=_heat(comparison.tensors),
        table=_table(comparison),
        value=_value,
        explanation=explanation,
    )


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page to a file; errors as of `write_document`."""
    return write_document(render_comparison(comparison), path)


def _titles(comparison: Comparison) -> tuple[str, ...]:
    first, second = comparison.names
    return ("relative", "cosine", "distance", f"‖D‖ {first}", f"‖D‖ {second}")


def _sizes(comparison: Comparison) -> list[tuple[str, float, str, str]]:
    """Bars of both merged changes, and of the distance between them."""
    if comparison.sizes is None:
        return []
    lengths = (*comparison.sizes, math.hypot(*(t.distance for t in comparison.differing)))
    longest = max(lengths) or 1.0
    names, styles = (*comparison.names, "between them"), (*(f"{c} solid" for c in COLOURS), "share")
    return [(n, v / longest, number(v), s) for n, v, s in zip(names, lengths, styles, strict=True)]


def _longer(comparison: Comparison) -> tuple[str, float, str] | None:
    """The merge whose change is longer, how many times, and the other."""
    if comparison.sizes is None or not all(comparison.sizes):
        return None
    first, second = comparison.names
    ratio = comparison.sizes[0] / comparison.sizes[1]
    return (first, ratio, second) if ratio >= 1 else (second, 1 / ratio, first)


def _issues(comparison: Comparison) -> list[tuple[str, int]]:
    """The merges that have issues among the checks that differ, and how many."""
    sides = ([c.first for c in comparison.checks], [c.second for c in comparison.checks])
    counted = (sum((v or "").startswith("issue") for v in verdicts) for verdicts in sides)
    return [(name, n) for name, n in zip(comparison.names, counted, strict=True) if n]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _heat(tensors: Sequence[TensorDifference]) -> HeatMap | None:
    """Depth x kind where relative distances are known, the most different kinds first; halved, from 0 to 1."""
    kinds: dict[str, list[TensorDifference]] = {}
    for t in tensors:
        if t.depth is not None and (t.same or t.relative is not None) and len(t.shape) > 1:
            kinds.setdefault(kind_of_name(t.name), []).append(t)
    depths = sorted({t.depth for ts in kinds.values() for t in ts if t.depth is not None})
    if len(depths) < 2:
        return None
    values = [_far(t) / FURTHEST for ts in kinds.values() for t in ts]
    scale = HeatScale.over(values)
    shown = sorted(kinds.items(), key=lambda kind: -max(map(_far, kind[1])))[:MOST_KINDS]

    def cell(t: TensorDifference) -> Cell:
        return Cell(scale.level(min(_far(t) / FURTHEST, 0.999)), f"{t.name}: {number(_far(t))}")

    rows = largest_strips(shown, depths, depth=lambda t: t.depth, value=_far, cell=cell, text=number)
    return HeatMap(rows, [str(d) for d in depths], "largest", values)


def _far(t: TensorDifference) -> float:
    return 0.0 if t.same or t.relative is None else t.relative


def _table(comparison: Comparison) -> BigTable:
    rows = comparison.tensors
    values = [(0.0 if t.same else t.relative, t.cosine, t.distance, *(t.norms or (None, None))) for t in rows]
    first, second = comparison.names
    columns = [
        Column("tensor", "name", [t.name for t in rows]),
        Column("shape", "text", [shape_text(t.shape) for t in rows]),
        Column(f"{first}: action", "choice", [t.actions[0] for t in rows]),
        Column(f"{second}: action", "choice", [t.actions[1] for t in rows]),
        Column("stored", "choice", ["same" if t.same else "differ" for t in rows]),
        *(Column(title, "number", [v[i] for v in values]) for i, title in enumerate(_titles(comparison))),
    ]
    return BigTable(columns)
