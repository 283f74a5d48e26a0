"""Section "Spectra": one panel per kind of matrix, with the eigenvalues of S in a few layers each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from actmat.diagnostics.model import Diagnosis, Measure
from actmat.report.html.elements import section
from actmat.report.html.figures import figure, heat_legend, numbers
from actmat.report.html.layers import kinds
from actmat.report.html.lines import scree
from actmat.report.html.markup import Child, Markup, el
from actmat.report.html.scales import number
from actmat.report.html.words import plural

__all__ = ["spectra"]

MOST_PANELS = 8
MOST_CURVES = 5


def spectra(diagnosis: Diagnosis) -> Markup:
    """The panels, and the numbers of all their curves as a table."""
    panels: list[Markup] = []
    rows: list[list[Child]] = []
    shown = kinds(diagnosis.measures, MOST_PANELS)
    for name, measures in shown:
        some = _spread(sorted(measures, key=lambda m: (m.layer is None, m.layer or 0)))
        curves = [
            (f"d{_depth(i, len(some))}", m.label if m.layer is None else f"layer {m.layer}", m.spectrum, m.rank_kept)
            for i, m in enumerate(some)
        ]
        effective = median(m.sum_effective_rank for m in measures)
        note = f"{measures[0].shape[1]} inputs; effective rank of S {number(effective)} (median)"
        panels.append(figure(name, scree(curves, label=f"Eigenvalues of S for {name}, largest first"), note=note))
        rows += [_row(m) for m in some]
    head = ["matrix", "effective rank", "numerical rank", "condition", "rank kept", "cut-off"]
    left = len({(m.name, m.part) for m in diagnosis.measures}) - sum(len(ms) for _, ms in shown)
    also = f" {plural(left, 'matrix', 'matrices')} of other kinds are in report.json." if left > 0 else ""
    return section(
        "spectra",
        "Spectra",
        heat_legend([f"d{i} solid" for i in range(MOST_CURVES)], "first layer", "last layer"),
        el("div", *panels, class_="panels"),
        numbers(head, rows, caption="Spectra of S = Σ DᵀD"),
        lead="How fast the eigenvalues of S = Σ DᵀD fall, relative to the largest: a steep curve means that few input "
        f"directions carry most of the change. A dot marks where the rule stopped, if it cuts.{also}",
    )


def _row(m: Measure) -> list[Child]:
    effective, condition, cutoff = map(number, (m.sum_effective_rank, m.condition, m.cutoff))
    return [m.label, effective, m.sum_numerical_rank, condition, m.rank_kept, cutoff]


def _spread(measures: Sequence[Measure]) -> list[Measure]:
    """At most `MOST_CURVES` of them, evenly from first to last."""
    if len(measures) <= MOST_CURVES:
        return list(measures)
    return [measures[round(i * (len(measures) - 1) / (MOST_CURVES - 1))] for i in range(MOST_CURVES)]


def _depth(index: int, count: int) -> int:
    return round(index * (MOST_CURVES - 1) / (count - 1)) if count > 1 else 2
