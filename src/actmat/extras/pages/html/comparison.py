"""The page of a comparison of two merges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat.extras.pages.comparison import MergeComparison, TensorDifference
from actmat.extras.pages.html.charts import HeatMap, kind_of, largest_strips
from actmat.extras.pages.html.environment import render, write_document
from actmat.extras.pages.html.scales import HeatScale, number

MOST_TENSORS = 10
FURTHEST = 2.0
"""Relative distance of a full bar, which is its maximum."""
COLORS = ("e0", "e1")
"""Styles of the first and the second merge in all figures."""


def render_comparison(comparison: MergeComparison) -> str:
    """Render a comparison as one HTML page; equal comparisons give equal pages."""
    top = comparison.differing[:MOST_TENSORS]
    return render(
        "comparison.html",
        c=comparison,
        colors=COLORS,
        tables=dict(comparison.tables),
        sizes=_sizes(comparison),
        top=top,
        longest=max((n for t in top for n in t.norms or ()), default=0.0) or 1.0,
        furthest=FURTHEST,
        heat=_heat(comparison.tensors),
    )


def write_comparison(comparison: MergeComparison, path: str | Path) -> Path:
    """Write the page to a file; raises the errors of `write_document`."""
    return write_document(render_comparison(comparison), path)


def _sizes(comparison: MergeComparison) -> list[tuple[str, float, str, str]]:
    """Bars of both merged deltas and of the distance between them."""
    if comparison.sizes is None:
        return []
    lengths = (*comparison.sizes, comparison.distance)
    longest = max(lengths) or 1.0
    names, styles = (*comparison.names, "between them"), (*(f"{c} solid" for c in COLORS), "share")
    return [(n, v / longest, number(v), s) for n, v, s in zip(names, lengths, styles, strict=True)]


def _heat(tensors: Sequence[TensorDifference]) -> HeatMap | None:
    """Heat map of relative distances by kind and depth, largest first, halved to 0 to 1; None if unknown."""
    kinds: dict[str, list[TensorDifference]] = {}
    for t in tensors:
        if t.depth is not None and (t.same or t.relative is not None) and len(t.shape) > 1:
            kinds.setdefault(kind_of(t.name), []).append(t)
    depths = sorted({t.depth for ts in kinds.values() for t in ts if t.depth is not None})
    if len(depths) < 2:
        return None

    def share(t: TensorDifference) -> float:
        return min((t.relative or 0.0) / FURTHEST, 0.999)

    values = [share(t) for ts in kinds.values() for t in ts]
    rows = largest_strips(
        kinds,
        depths,
        depth=lambda t: t.depth,
        value=share,
        tip=lambda t: f"{t.name}: {number(t.relative or 0.0)}",
        text=lambda v: number(FURTHEST * v),
        scale=HeatScale.over(values),
    )
    return HeatMap(rows, [str(d) for d in depths], "largest", values)
