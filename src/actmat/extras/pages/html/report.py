"""Report page of a diagnosis: quality, experts, layers, size, recipe.

`T` experts; every vector has `T` entries. Norms add in squares, since matrices are blocks of one long vector.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from actmat.diagnostics.answers import GUESSES, kept_words, verdict
from actmat.diagnostics.model import Diagnosis, ExpertRow, Matrix, MatrixRow
from actmat.extras.pages.html import charts, scales
from actmat.extras.pages.html.environment import render, write_document
from actmat.recipe.load import printable_yaml
from actmat.report.words import measure_answers

MOST_MATRICES = 10
"""Number of matrices listed by name."""
MOST_KINDS = 14
"""Maximum number of matrix kinds in a heat map."""


def render_html(diagnosis: Diagnosis) -> str:
    """Render the report of a diagnosis as one HTML page; equal diagnoses give equal pages."""
    raised = (f for f in diagnosis.findings if not f.muted)
    issues = sorted(raised, key=lambda f: (f.severity != "issue", f.code))
    return render(
        "report.html",
        d=diagnosis,
        found=issues,
        muted=[f for f in diagnosis.findings if f.muted],
        off=next((c for c in issues if c.code in GUESSES), None),
        measure=measure_answers(diagnosis),
        verdict=verdict(diagnosis.agreement or ()),
        kept=kept_words,
        experts=[_expert(diagnosis, t, e) for t, e in enumerate(diagnosis.experts)],
        overlap=overlap(diagnosis) if diagnosis.measures and len(diagnosis.experts) > 1 else [],
        layers=residuals(diagnosis) if diagnosis.measures else None,
        size=sizes(diagnosis) if diagnosis.measures else None,
        actions=Counter(diagnosis.actions).most_common(),
        recipe=printable_yaml({k: v for k, v in diagnosis.recipe.items() if k != "out"}),
        place=shlex.quote(diagnosis.out or "merged"),
    )


def write_html(diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write the report of a diagnosis to a file; raises the errors of `write_document`."""
    return write_document(render_html(diagnosis), path)


# Experts


class ShownExpert(NamedTuple):
    """Table row of one expert: entry, residual on data, norms and rounding over the measured matrices."""

    entry: ExpertRow
    on_data: str
    relative: str
    rounding: str
    is_unchanged: bool


def _expert(diagnosis: Diagnosis, t: int, entry: ExpertRow) -> ShownExpert:
    changed = [m for m in diagnosis.measures if m.norms[t]]
    relative = [m.relative_norms[t] for m in changed if m.relative_norms is not None]
    snr = [m.snr[t] for m in changed if m.snr is not None]
    on_data = {r.expert: scales.residual_text(r.residual) for r in diagnosis.residual_on_data or ()}
    return ShownExpert(
        entry,
        on_data.get(entry.name, "–"),
        scales.percent(median(relative)) if relative else "–",
        " to ".join(dict.fromkeys(map(scales.number, (min(snr), max(snr))))) if snr else "–",
        not changed,
    )


class PairTable(NamedTuple):
    """Numbers per pair of experts: a colored table of (text, class, value), and their range if all are alike."""

    title: str
    note: str
    rows: Sequence[Sequence[tuple[str, str, float]]]
    alike: tuple[str, str] | None


def overlap(diagnosis: Diagnosis) -> list[PairTable]:
    """Cosines of whole deltas, and overlaps of their subspaces relative to chance."""
    measures = diagnosis.measures
    entries = [m.shape[0] * m.shape[1] for m in measures]
    weighted = list(zip(entries, measures, strict=True))
    chance = sum(n * m.chance_overlap for n, m in weighted) / sum(entries)
    size = range(len(diagnosis.experts))
    shared = [[math.fsum(n * m.subspace_overlap[s][t] for n, m in weighted) / sum(entries) for t in size] for s in size]
    others = [v for s in size for t, v in enumerate(shared[s]) if s != t]
    return [
        _pairs(
            "Cosine",
            "Between whole changes. 0: unrelated; 1: the same direction; below 0: opposed.",
            overall_cosine(measures),
            lambda v: f"{v:z.2f}",
            scales.diverging,
        ),
        _pairs(
            "Shared subspace",
            f"Extent to which two experts change the same input directions, weighted by size; by chance "
            f"{scales.percent(chance)}.",
            shared,
            scales.percent,
            scales.HeatScale.over(others).level,
        ),
    ]


def overall_cosine(measures: Sequence[MatrixRow]) -> Matrix:
    """Cosine of whole experts: `sum_m <D_s, D_t> / (||D_s|| ||D_t||)` over all measured matrices; 0 for zero deltas."""
    size = range(len(measures[0].norms))
    norms = [math.hypot(*(m.norms[t] for m in measures)) for t in size]

    def cosine(s: int, t: int) -> float:
        inner = math.fsum(m.cosine[s][t] * m.norms[s] * m.norms[t] for m in measures)
        return inner / (norms[s] * norms[t]) if norms[s] and norms[t] else 0.0

    return tuple(tuple(cosine(s, t) for t in size) for s in size)


def _pairs(
    title: str,
    note: str,
    values: Sequence[Sequence[float]],
    text: Callable[[float], str],
    color: Callable[[float], str],
) -> PairTable:
    rows = [[(text(v), "self" if s == t else color(v), v) for t, v in enumerate(row)] for s, row in enumerate(values)]
    alike = scales.spread(v for s, row in enumerate(values) for t, v in enumerate(row) if s != t)
    return PairTable(title, note, rows, None if alike is None else (text(alike[0]), text(alike[1])))


# Layers


def layers_of(measures: Sequence[MatrixRow]) -> dict[int | None, list[MatrixRow]]:
    """Matrices by depth; matrices without a depth come last."""
    layers: dict[int | None, list[MatrixRow]] = {}
    for m in sorted(measures, key=lambda m: (m.layer is None, m.layer or 0)):
        layers.setdefault(m.layer, []).append(m)
    return layers


def _label(depth: int | None) -> str:
    return "other" if depth is None else str(depth)


def _title(depth: int | None) -> str:
    return "outside the layers" if depth is None else f"layer {depth}"


def residual_over(measures: Sequence[MatrixRow], expert: int) -> float | None:
    """`sqrt(sum_m ||D_t||^2 rho_t^2 / sum_m ||D_t||^2)`, the energy-weighted rms; None if nothing changed."""
    energy = math.fsum(m.norms[expert] ** 2 for m in measures)
    if energy == 0:
        return None
    return math.sqrt(math.fsum((m.residual[expert] * m.norms[expert]) ** 2 for m in measures) / energy)


def residuals(diagnosis: Diagnosis) -> dict[str, Any]:
    """Heat maps of residuals over layers by expert and by kind, and the matrices with the largest."""
    layers, names = layers_of(diagnosis.measures), [e.name for e in diagnosis.experts]
    columns = list(map(_label, layers))
    by_expert = [[residual_over(ms, t) for ms in layers.values()] for t in range(len(names))]
    values = [v for row in by_expert for v in row if v is not None]
    scale = scales.HeatScale.over(values)
    strips = [
        charts.Strip(
            expert.name,
            [
                None if v is None else charts.HeatCell(scale.level(v), f"{_title(d)}, {expert.name}: ρ {v:.2f}")
                for d, v in zip(layers, row, strict=True)
            ],
            scales.residual_text(expert.residual),
        )
        for expert, row in zip(diagnosis.experts, by_expert, strict=True)
    ]
    largest = [m.contested for m in diagnosis.measures]
    by_kind = list(_kind_strips(diagnosis.measures, list(layers), names))
    return {
        "experts": charts.HeatMap(strips, columns, "all", values),
        "kinds": charts.HeatMap(by_kind, columns, "largest", largest),
        "table": [[_title(d), *map(scales.residual_text, v)] for d, *v in zip(layers, *by_expert, strict=True)],
        "matrices": [
            [m.label, scales.residual_text(m.contested), names[m.residual.index(m.contested)],
             "×".join(map(str, m.shape)), scales.number(m.merged_norm), scales.number(m.sum_norm / len(m.norms))]
            for m in sorted(diagnosis.measures, key=lambda m: (-m.contested, m.label))[:MOST_MATRICES]
        ],
    }  # fmt: skip


def _kind_strips(
    measures: Sequence[MatrixRow], depths: Sequence[int | None], names: Sequence[str]
) -> Iterator[charts.Strip]:
    """One row per kind of matrix, largest residual first; each cell shows the largest at a depth."""
    scale = scales.HeatScale.over([m.contested for m in measures])
    kinds: dict[str, dict[int | None, MatrixRow]] = {}
    for m in sorted(measures, key=lambda m: -m.contested):
        kinds.setdefault(charts.kind_of(m.name, m.part), {}).setdefault(m.layer, m)
    for kind, rows in list(kinds.items())[:MOST_KINDS]:
        cells = [
            charts.HeatCell(
                scale.level(w.contested), f"{w.label}: {names[w.residual.index(w.contested)]}, ρ {w.contested:.2f}"
            )
            if (w := rows.get(depth))
            else None
            for depth in depths
        ]
        yield charts.Strip(kind, cells, scales.residual_text(max(m.contested for m in rows.values())))


# Size


def sizes(diagnosis: Diagnosis) -> dict[str, Any]:
    """Norms of the merged delta, the experts' sum and their mean: total, and by layer."""
    layers = layers_of(diagnosis.measures)
    count, fields = len(diagnosis.experts), ("sum_norm", "merged_norm")
    whole = [math.hypot(*(getattr(m, field) for m in diagnosis.measures)) for field in fields]
    expert = math.hypot(*(n for m in diagnosis.measures for n in m.norms)) / math.sqrt(count)
    total, merged = ([math.hypot(*(getattr(m, f) for m in ms)) for ms in layers.values()] for f in fields)
    mean = [norm / count for norm in total]
    lines = [
        charts.Line("gray", "sum of the experts", total),
        charts.Line("merged thick", "merged", merged),
        charts.Line("gray dash", "their mean", mean),
    ]
    bars = [("merged", whole[1], "merged solid"), ("sum of the experts", whole[0], "share"),
            ("their mean", whole[0] / count, "share"), ("one expert, on average", expert, "share")]  # fmt: skip
    longest = max(n for _, n, _ in bars) or 1.0
    axis = scales.positive_axis([*total, *merged, *mean])
    numbers = zip(layers, total, merged, mean, strict=True)
    return {
        "bars": [(name, n / longest, scales.number(n), style) for name, n, style in bars],
        "ratios": [(whole[1] / n, words) for n, words in ((expert, "one expert's"), (whole[0], "their sum's")) if n],
        "plot": charts.layer_lines(lines, list(map(_label, layers)), axis, label="Norms of the change by layer"),
        "table": [[_title(depth), *map(scales.number, row)] for depth, *row in numbers],
    }
