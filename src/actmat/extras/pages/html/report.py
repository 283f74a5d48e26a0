"""Report page of a diagnosis: quality, experts, layers, recipe.

`T` experts; every vector has `T` entries. Norms add in squares, since matrices are blocks of one long vector.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from actmat.diagnostics.answers import OF_SIZE, kept_words, verdict
from actmat.diagnostics.model import Diagnosis, ExpertRow, Matrix, MatrixRow
from actmat.extras.pages.html import scales
from actmat.extras.pages.html.environment import render, write_document
from actmat.recipe.load import printable_yaml
from actmat.report.words import measure_answers

MOST_MATRICES = 10
"""Number of matrices listed by name."""


def render_html(diagnosis: Diagnosis) -> str:
    """Render the report of a diagnosis as one HTML page; equal diagnoses give equal pages."""
    raised = (f for f in diagnosis.findings if not f.muted)
    issues = sorted(raised, key=lambda f: (f.severity != "issue", f.code))
    return render(
        "report.html",
        d=diagnosis,
        found=issues,
        muted=[f for f in diagnosis.findings if f.muted],
        off=next((c for c in issues if c.code in OF_SIZE), None),
        measure=measure_answers(diagnosis),
        verdict=verdict(diagnosis.agreement or ()),
        kept=kept_words,
        experts=[_expert(diagnosis, t, e) for t, e in enumerate(diagnosis.experts)],
        cosines=_cosines(diagnosis) if diagnosis.measures and len(diagnosis.experts) > 1 else [],
        layers=residuals(diagnosis) if diagnosis.measures else None,
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


def overall_cosine(measures: Sequence[MatrixRow]) -> Matrix:
    """Cosine of whole experts: `sum_m <D_s, D_t> / (||D_s|| ||D_t||)` over all measured matrices; 0 for zero deltas."""
    size = range(len(measures[0].norms))
    norms = [math.hypot(*(m.norms[t] for m in measures)) for t in size]

    def cosine(s: int, t: int) -> float:
        inner = math.fsum(m.cosine[s][t] * m.norms[s] * m.norms[t] for m in measures)
        return inner / (norms[s] * norms[t]) if norms[s] and norms[t] else 0.0

    return tuple(tuple(cosine(s, t) for t in size) for s in size)


def _cosines(diagnosis: Diagnosis) -> list[list[str]]:
    """Rows of a table of experts by experts."""
    rows = zip(diagnosis.experts, overall_cosine(diagnosis.measures), strict=True)
    return [[expert.name, *(f"{v:z.2f}" for v in row)] for expert, row in rows]


# Layers


def layers_of(measures: Sequence[MatrixRow]) -> dict[int | None, list[MatrixRow]]:
    """Matrices by depth; matrices without a depth come last."""
    layers: dict[int | None, list[MatrixRow]] = {}
    for m in sorted(measures, key=lambda m: (m.layer is None, m.layer or 0)):
        layers.setdefault(m.layer, []).append(m)
    return layers


def _title(depth: int | None) -> str:
    return "outside the layers" if depth is None else f"layer {depth}"


def residual_over(measures: Sequence[MatrixRow], expert: int) -> float | None:
    """`sqrt(sum_m ||D_t||^2 rho_t^2 / sum_m ||D_t||^2)`, the energy-weighted rms; None if nothing changed."""
    energy = math.fsum(m.norms[expert] ** 2 for m in measures)
    if energy == 0:
        return None
    return math.sqrt(math.fsum((m.residual[expert] * m.norms[expert]) ** 2 for m in measures) / energy)


def residuals(diagnosis: Diagnosis) -> dict[str, Any]:
    """Residuals by layer and expert with their color classes, and the matrices with the largest."""
    names = [e.name for e in diagnosis.experts]
    rows = [
        (_title(depth), [residual_over(measures, t) for t in range(len(names))])
        for depth, measures in layers_of(diagnosis.measures).items()
    ]
    return {
        "rows": [(title, [(scales.residual_text(v), scales.residual_level(v)) for v in row]) for title, row in rows],
        "matrices": [
            [m.label, scales.residual_text(m.contested), names[m.residual.index(m.contested)],
             "×".join(map(str, m.shape)), scales.number(m.merged_norm), scales.number(m.sum_norm / len(m.norms))]
            for m in sorted(diagnosis.measures, key=lambda m: (-m.contested, m.label))[:MOST_MATRICES]
        ],
    }  # fmt: skip
