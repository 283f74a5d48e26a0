"""The page of a comparison of two merges."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actmat.extras.pages.comparison import CheckDifference, Comparison, TensorDifference
from actmat.extras.pages.html.charts import (
    TENTHS,
    Bar,
    Cell,
    bars,
    figure,
    gauge,
    heat_legend,
    largest_strips,
    line_key,
    strips,
)
from actmat.extras.pages.html.elements import (
    Child,
    Markup,
    bullets,
    caveat,
    document,
    dotted,
    el,
    join,
    section,
    shape_text,
    stacked_table,
    tensor_link,
    tiles,
    write_document,
)
from actmat.extras.pages.html.measures import kind_of_name
from actmat.extras.pages.html.scales import HeatScale, number, residual_text, spread
from actmat.extras.pages.html.tensors import Column, big_table
from actmat.extras.pages.html.verdicts import explanation
from actmat.report.words import IN_PLACES, plural, size_words
from actmat.version import __version__

MOST_TENSORS = 10
MOST_KINDS = 14
FURTHEST = 2.0
"""Relative distance at the end of a bar: no larger one exists."""
COLOURS = ("e0", "e1")
"""Of the first merge and of the second, in every figure."""


def _titles(comparison: Comparison) -> tuple[str, ...]:
    first, second = comparison.names
    return ("relative", "cosine", "distance", f"‖D‖ {first}", f"‖D‖ {second}")


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
    shown = (
        join([el("b", n), " ", el("code", *dotted(o))]) for n, o in zip(comparison.names, comparison.outs, strict=True)
    )
    items = (el("li", line_key(c), s) for c, s in zip(COLOURS, shown, strict=True))
    subtitle = el("ul", *items, class_="legend sides")
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
    ]
    if comparison.relative is not None:
        said.append("Relative distance: 0 is the same, 1 as far apart as a change is long, 2 the most that can be.")
    entries = [
        (f"{len(comparison.tensors):,}", "tensors compared", ""),
        (f"{len(differing):,}", "differ", ""),
        (number(comparison.relative), "relative distance", ""),
    ]
    for name, norms in zip(comparison.names, comparison.totals, strict=True):
        if words := size_words(norms):
            said.append(f"Size of {name}: {words}.")
    notes = [el("p", f"{n[:1].upper()}{n[1:]}.", class_="caveat") for n in comparison.notes]
    kind = "tip" if differing else "good"
    banner = el("div", el("strong", _headline(comparison)), _apart(comparison), class_=f"banner {kind}")
    pair = el("div", _sizes(comparison), el("div", bullets(said), tiles(entries)), class_="pair")
    return section("summary", "Summary", banner, pair, *notes)


def _sizes(comparison: Comparison) -> Markup | None:
    """Bars of both merged changes, and of the distance between them."""
    if comparison.sizes is None:
        return None
    apart = math.hypot(*(t.distance for t in comparison.differing))
    longest = max(*comparison.sizes, apart) or 1.0
    lengths, styles = (*comparison.sizes, apart), (*(f"{c} solid" for c in COLOURS), "share")
    names = (*comparison.names, "between them")
    lines = [Bar(n, v / longest, number(v), c) for n, v, c in zip(names, lengths, styles, strict=True)]
    note = el("p", "Norm ‖D‖ of each merged change, where the two differ.", class_="note")
    return el("div", el("h3", "Size of the change"), bars(lines), note)


def _headline(comparison: Comparison) -> str:
    differing = len(comparison.differing)
    if not differing:
        return "All tensors are the same."
    others = comparison.in_other_dtypes
    only = f"; {others:,} of these only in dtype, with equal values" if others else ""
    return f"{differing:,} of {plural(len(comparison.tensors), 'tensor')} differ{only}."


def _apart(comparison: Comparison) -> str:
    """Sentences that compare the sizes, and tell which side has issues among the checks that differ."""
    said = [""]
    first, second = comparison.names
    if comparison.sizes is not None and all(comparison.sizes):
        ratio = comparison.sizes[0] / comparison.sizes[1]
        longer, shorter, times = (first, second, ratio) if ratio >= 1 else (second, first, 1 / ratio)
        said.append(f"The change of {longer} is {number(times)} times as long as that of {shorter}.")
    sides = ([c.first for c in comparison.checks], [c.second for c in comparison.checks])
    for name, verdicts in zip((first, second), sides, strict=True):
        if issues := sum((v or "").startswith("issue") for v in verdicts):
            said.append(f"Of the checks that differ, {name} has {plural(issues, 'issue')}.")
    return " ".join(said)


def _settings(comparison: Comparison) -> Markup:
    rows = [[s.field, _value(s.first), _value(s.second)] for s in comparison.settings]
    table = stacked_table(["field", *comparison.names], rows, caption="What differs in the recipes")
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
    end = max(1.0, *(v for r in comparison.residuals for v in (r.first, r.second)))
    rows: list[list[Child]] = []
    for r in comparison.residuals:
        both = zip((r.first, r.second), COLOURS, strict=True)
        bars_of = [gauge(v / end, residual_text(v), f"{c} solid", mark=1 / end) for v, c in both]
        rows.append([r.expert, *bars_of, f"{r.second - r.first:+.2f}".replace("-", "−")])
    first, second = comparison.names
    table = stacked_table(["expert", first, second, f"{second} − {first}"], rows, caption="Residual ρ by expert")
    return section(
        "experts",
        "Residuals",
        table,
        *_far_off(comparison),
        caveat(),
        lead="How near each merge comes to each expert, on the directions that the expert changed: ρ = 0 is as the "
        "expert, ρ = 1 as the base.",
    )


def _far_off(comparison: Comparison) -> list[Markup]:
    """A sentence for each merge of the wrong size: its residuals are no praise."""
    both = zip(comparison.names, comparison.size_codes, strict=True)
    words = "ρ looks at the experts' own directions only, and can be small although the change is far off elsewhere."
    return [
        el(
            "p",
            el(
                "strong",
                f"Do not judge {name} by its ρ: the size of its change is off{IN_PLACES.get(code, '')} ({code}). ",
            ),
            words,
            class_="caveat",
        )
        for name, code in both
        if code is not None
    ]


def _checks(comparison: Comparison) -> Markup | None:
    if not all(comparison.diagnosed):
        return None
    rows = [[_meant(c), _outcome(c.first), _outcome(c.second)] for c in comparison.checks]
    table = stacked_table(["check", *comparison.names], rows, caption="Checks that differ")
    return section("checks", "Checks", table if rows else el("p", "All checks say the same of both."))


def _meant(check: CheckDifference) -> Markup:
    """Code and title of a check; its explanation opens."""
    text = explanation(check.code)
    more = el("details", el("summary", "What it means"), text) if text is not None else None
    return join([el("code", check.code), " ", check.title, more])


def _outcome(verdict: str | None) -> Markup:
    """A verdict in its colour."""
    if verdict is None:
        return el("span", "–")
    kind = verdict.partition(" ")[0]
    return el("span", verdict, class_=f"badge {kind if kind in ('issue', 'tip', 'clear') else 'none'}")


def _layers(comparison: Comparison) -> Markup | None:
    """The tensors that differ most, and a heat map of depth x kind where relative distances are known."""
    differing = comparison.differing
    if not differing:
        return None
    longest = max((n for t in differing[:MOST_TENSORS] for n in t.norms or ()), default=0.0) or 1.0
    rows = [[tensor_link(t.name), *_cells(t, longest)] for t in differing[:MOST_TENSORS]]
    top = stacked_table(["tensor", *_titles(comparison)], rows, caption="Tensors that differ most")
    return section(
        "layers",
        "Where they differ",
        figure(f"The {len(rows)} tensors that differ most", top),
        _heat(comparison.tensors),
        lead="Relative: the distance between the merged weights over the mean size of the two merged changes. 0 is the "
        "same, 1 as far apart as a change is long; more than 2 is impossible.",
    )


def _cells(t: TensorDifference, longest: float) -> list[Child]:
    """The numbers of a tensor; bars where lengths compare."""
    relative, cosine, distance, *norms = _numbers(t)
    far = "–" if relative is None else gauge(relative / FURTHEST, number(relative), "share", mark=1 / FURTHEST)
    both = zip(norms, COLOURS, strict=True)
    sizes = ("–" if n is None else gauge(n / longest, number(n), f"{c} solid") for n, c in both)
    return [far, number(cosine), number(distance), *sizes]


def _numbers(t: TensorDifference) -> tuple[float | None, ...]:
    """Values of `_titles`."""
    return (t.relative, t.cosine, t.distance, *(t.norms or (None, None)))


def _heat(tensors: Sequence[TensorDifference]) -> Markup | None:
    kinds: dict[str, list[TensorDifference]] = {}
    for t in tensors:
        if t.depth is not None and (t.same or t.relative is not None) and len(t.shape) > 1:
            kinds.setdefault(kind_of_name(t.name), []).append(t)
    depths = sorted({t.depth for ts in kinds.values() for t in ts if t.depth is not None})
    if len(depths) < 2:
        return None
    values = [_far(t) for ts in kinds.values() for t in ts]
    scale = HeatScale.over(v / FURTHEST for v in values)
    rows = largest_strips(
        sorted(kinds.items(), key=lambda kind: -max(map(_far, kind[1])))[:MOST_KINDS],
        depths,
        depth=lambda t: t.depth,
        value=_far,
        cell=lambda t: Cell(scale.level(min(_far(t) / FURTHEST, 0.999)), f"{t.name}: {number(_far(t))}"),
        text=number,
    )
    if (ends := spread(values)) is not None:
        said = f"All alike: {number(ends[0])} to {number(ends[1])} in every matrix of every layer."
        return figure("Relative distance by layer", el("p", said))
    legend = heat_legend(TENTHS, f"{FURTHEST * scale.low:.1f}", f"{FURTHEST * scale.high:.1f}")
    return figure(
        "Relative distance by layer",
        legend,
        strips(rows, [str(d) for d in depths], x_title="layer", total_title="largest"),
        note="Kinds of matrices, the most different first.",
    )


def _far(t: TensorDifference) -> float:
    return 0.0 if t.same or t.relative is None else t.relative


def _tensors(comparison: Comparison) -> Markup:
    rows = comparison.tensors
    values = [(0.0, *_numbers(t)[1:]) if t.same else _numbers(t) for t in rows]
    first, second = comparison.names
    columns = [
        Column("tensor", "name", [t.name for t in rows]),
        Column("shape", "text", [shape_text(t.shape) for t in rows]),
        Column(f"{first}: action", "choice", [t.actions[0] for t in rows]),
        Column(f"{second}: action", "choice", [t.actions[1] for t in rows]),
        Column("stored", "choice", ["same" if t.same else "differ" for t in rows]),
        *(Column(title, "number", [v[i] for v in values]) for i, title in enumerate(_titles(comparison))),
    ]
    return section(
        "tensors",
        "Every tensor",
        big_table(columns, caption="Every tensor and how far the two merges are apart there"),
        lead="In the order of the output. What both stored with the same bytes was not read.",
    )
