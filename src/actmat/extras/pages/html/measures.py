"""Sums over matrices, and the figures of residuals, overlap of experts, spectra, norms, and change against rounding.

`T` experts; every vector has `T` entries. Norms add in squares, since matrices are blocks of one long vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from actmat.diagnostics.model import Diagnosis, Matrix, Measure, Vector
from actmat.extras.pages.html import charts, scales


@dataclass(frozen=True, slots=True)
class Layer:
    """The measured matrices at one depth; `depth` is None for those outside the stack of layers."""

    depth: int | None
    measures: tuple[Measure, ...]

    @property
    def label(self) -> str:
        """Short name for an axis."""
        return "other" if self.depth is None else str(self.depth)

    @property
    def title(self) -> str:
        """Name for a sentence."""
        return "outside the layers" if self.depth is None else f"layer {self.depth}"


def layers_of(measures: Iterable[Measure]) -> list[Layer]:
    """Layers by depth; matrices without a depth come last."""
    found: dict[int | None, list[Measure]] = {}
    for m in measures:
        found.setdefault(m.layer, []).append(m)
    depths: list[int | None] = [*sorted(d for d in found if d is not None), *([None] if None in found else [])]
    return [Layer(d, tuple(found[d])) for d in depths]


def residual_over(measures: Sequence[Measure], expert: int) -> float | None:
    """`sqrt(sum_m ||D_t||^2 rho_t^2 / sum_m ||D_t||^2)`: energy-weighted rms; None where nothing changed."""
    energy = math.fsum(m.norms[expert] ** 2 for m in measures)
    if energy == 0:
        return None
    return math.sqrt(math.fsum((m.residual[expert] * m.norms[expert]) ** 2 for m in measures) / energy)


def overall_cosine(measures: Sequence[Measure]) -> Matrix:
    """Cosine between whole experts: `sum_m <D_s, D_t> / (||D_s|| ||D_t||)` over all measured matrices; 0 for a zero."""
    size = len(measures[0].norms)
    norms = [math.hypot(*(m.norms[t] for m in measures)) for t in range(size)]

    def cosine(s: int, t: int) -> float:
        inner = math.fsum(m.cosine[s][t] * m.norms[s] * m.norms[t] for m in measures)
        return inner / (norms[s] * norms[t]) if norms[s] and norms[t] else 0.0

    return tuple(tuple(cosine(s, t) for t in range(size)) for s in range(size))


def overall_share(measures: Sequence[Measure], share: Callable[[Measure], Matrix | float | None]) -> Matrix | None:
    """Mean of a `T x T` share over matrices, by their number of entries; None where no matrix has it."""
    found = [(m.shape[0] * m.shape[1], v) for m in measures if isinstance(v := share(m), tuple)]
    if not found:
        return None
    total = sum(n for n, _ in found)
    size = len(found[0][1])

    def mean(s: int) -> Vector:
        return tuple(math.fsum(n * v[s][t] for n, v in found) / total for t in range(size))

    return tuple(mean(s) for s in range(size))


def kind_of(measure: Measure) -> str:
    """Name of a matrix without its layer: `kind_of_name`, and its part.

    `model.layers.3.self_attn.q_proj.weight` -> `self_attn.q_proj`; `h.2.attn.c_attn.weight`, q -> `attn.c_attn [q]`.
    """
    part = re.sub(r"\d+", "*", measure.part)
    return kind_of_name(measure.name) + (f" [{part}]" if part else "")


def kind_of_name(name: str) -> str:
    """The last two words of a tensor's name, without numbers."""
    return ".".join([w for w in name.removesuffix(".weight").split(".") if not w.isdigit()][-2:])


def kinds(measures: Sequence[Measure], most: int) -> list[tuple[str, list[Measure]]]:
    """The kinds that hold most of the energy, in the order of the model."""
    found: dict[str, list[Measure]] = {}
    for m in measures:
        found.setdefault(kind_of(m), []).append(m)
    energy = {k: sum(n * n for m in ms for n in m.norms) for k, ms in found.items()}
    kept = set(sorted(energy, key=lambda k: (-energy[k], k))[:most])
    return [(k, ms) for k, ms in found.items() if k in kept]


Rows = Sequence[Sequence[object]]
"""Rows of a table; the first cell of each is its heading."""

MOST_KINDS = 14


def residuals(diagnosis: Diagnosis) -> dict[str, Any]:
    """Heat maps of the residuals by expert and by kind of matrix over layers, and the former as a table."""
    layers = layers_of(diagnosis.measures)
    columns = [x.label for x in layers]
    by_layer = [[residual_over(x.measures, t) for t in range(len(diagnosis.experts))] for x in layers]
    values = [v for row in by_layer for v in row if v is not None]
    scale, rows = scales.HeatScale.over(values), []
    for t, expert in enumerate(diagnosis.experts_summary):
        cells = [
            None
            if v[t] is None
            else charts.Cell(scale.level(v[t]), f"{x.title}, {expert.name}: ρ {scales.residual_sign(v[t])}")
            for x, v in zip(layers, by_layer, strict=True)
        ]
        rows.append(charts.Strip(expert.name, cells, scales.residual_text(expert.residual)))
    worst = [m.contested for m in diagnosis.measures]
    kind_scale = scales.HeatScale.over(worst)

    def cell(m: Measure) -> charts.Cell:
        expert = diagnosis.experts[m.residual.index(m.contested)].name
        return charts.Cell(kind_scale.level(m.contested), f"{m.label}: {expert}, ρ {scales.residual_sign(m.contested)}")

    shown, depths = kinds(diagnosis.measures, MOST_KINDS), [x.depth for x in layers]
    by_kind = charts.largest_strips(
        shown, depths, depth=lambda m: m.layer, value=lambda m: m.contested, cell=cell, text=scales.residual_text
    )
    return {
        "experts": charts.HeatMap(rows, columns, "all", values),
        "kinds": charts.HeatMap(by_kind, columns, "largest", worst),
        "table": [[x.title, *map(scales.residual_text, v)] for x, v in zip(layers, by_layer, strict=True)],
    }


class Pairs(NamedTuple):
    """Numbers of pairs of experts: a coloured table, and the ends where they are all alike."""

    title: str
    caption: str
    note: str
    rows: Sequence[Sequence[tuple[str, str, float]]]
    alike: tuple[str, str] | None


def _pairs(
    titles: tuple[str, str, str], values: Matrix, ends: Callable[[float], str], cell: Callable[[float], str]
) -> Pairs:
    others = [v for s, row in enumerate(values) for t, v in enumerate(row) if s != t]
    colour = scales.diverging if cell is ends else scales.HeatScale.over(others).level
    rows = [[(cell(v), "self" if s == t else colour(v), v) for t, v in enumerate(row)] for s, row in enumerate(values)]
    alike = scales.spread(others)
    return Pairs(*titles, rows, None if alike is None else (ends(alike[0]), ends(alike[1])))


def overlap(diagnosis: Diagnosis) -> list[Pairs]:
    """Cosine, subspace overlap against chance, sign conflict; empty for one expert."""
    measures = diagnosis.measures
    if len(diagnosis.experts) < 2:
        return []
    entries = sum(m.shape[0] * m.shape[1] for m in measures)
    chance = sum(m.chance_overlap * m.shape[0] * m.shape[1] for m in measures) / entries

    def whole(share: float) -> str:
        return f"{100 * share:.0f}"

    def cosine(value: float) -> str:
        return f"{value:z.2f}"

    note = "Of whole changes. 0: unrelated; 1: the same direction; below 0: against each other."
    found = [_pairs(("Cosine", "Cosine between deltas", note), overall_cosine(measures), cosine, cosine)]
    if (shared := overall_share(measures, lambda m: m.subspace_overlap)) is not None:
        note = "Per cent: how far two experts change the same input directions, weighted by how much; by chance "
        found.append(
            _pairs(
                ("Shared subspace", "Subspace overlap", f"{note}{scales.percent(chance)}."),
                shared,
                scales.percent,
                whole,
            )
        )
    if (signs := overall_share(measures, lambda m: m.sign_conflict)) is not None:
        note = "Per cent of the entries that two experts move in opposite directions; by chance 50 %."
        found.append(_pairs(("Sign conflict", "Sign conflict", note), signs, scales.percent, whole))
    return found


MOST_PANELS = 8
MOST_CURVES = 5


class Panel(NamedTuple):
    """The spectra of one kind of matrix."""

    title: str
    inputs: int
    effective_rank: float
    plot: charts.Plot


def spectra(diagnosis: Diagnosis) -> dict[str, Any]:
    """The panels, the numbers of all their curves as a table, and how many matrices of other kinds there are."""
    panels, rows = [], []
    shown = kinds(diagnosis.measures, MOST_PANELS)
    for name, measures in shown:
        some = _some(sorted(measures, key=lambda m: (m.layer is None, m.layer or 0)))
        step = (MOST_CURVES - 1) / max(len(some) - 1, 1)  # a darker blue further down
        styles = [f"d{round(i * step) if len(some) > 1 else 2}" for i in range(len(some))]
        names = [m.label if m.layer is None else f"layer {m.layer}" for m in some]
        curves = [charts.Curve(s, n, m.spectrum, m.rank_kept) for s, n, m in zip(styles, names, some, strict=True)]
        effective = median(m.sum_effective_rank for m in measures)
        drawn = charts.scree(curves, label=f"Eigenvalues of S for {name}, largest first")
        panels.append(Panel(name, measures[0].shape[1], effective, drawn))
        for m in some:
            effective_text, condition, cutoff = map(scales.number, (m.sum_effective_rank, m.condition, m.cutoff))
            rows.append([m.label, effective_text, m.sum_numerical_rank, condition, m.rank_kept, cutoff])
    left = len({(m.name, m.part) for m in diagnosis.measures}) - sum(len(ms) for _, ms in shown)
    return {"panels": panels, "table": rows, "left": left}


def _some(measures: Sequence[Measure]) -> list[Measure]:
    """At most `MOST_CURVES` of them, evenly from first to last."""
    if len(measures) <= MOST_CURVES:
        return list(measures)
    return [measures[round(i * (len(measures) - 1) / (MOST_CURVES - 1))] for i in range(MOST_CURVES)]


def norms(diagnosis: Diagnosis) -> dict[str, Any]:
    """Size of the merged change by layer, between the mean and the sum of the experts' changes."""
    layers = layers_of(diagnosis.measures)
    total, merged, mean = (
        [math.hypot(*(getattr(m, field) for m in x.measures)) for x in layers]
        for field in ("sum_norm", "merged_norm", "mean_norm")
    )
    entries = (("grey", "sum", total), ("merged thick", "merged", merged), ("grey dash", "mean", mean))
    lines = [charts.Line(*entry) for entry in entries]
    ratios = [m / s if s else None for m, s in zip(merged, total, strict=True)]
    columns, label = [x.label for x in layers], "Norms of merged delta, mean and sum by layer"
    return {
        "plot": charts.layer_lines(lines, columns, scales.positive_axis([*total, *merged, *mean]), label=label),
        "table": [
            [x.title, *map(scales.number, row)] for x, *row in zip(layers, total, merged, mean, ratios, strict=True)
        ],
    }


FAR_ABOVE_ROUNDING = 1e3
"""Change over rounding from which a sentence takes the place of the figure: rounding is a thousandth at most."""


def rounding(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Change over half a step of the storage dtype, smallest matrix of each layer; None where it is not known."""
    layers = layers_of(m for m in diagnosis.measures if m.snr is not None)
    if not layers:
        return None

    def smallest(layer: Layer, t: int) -> float | None:
        return min((m.snr[t] for m in layer.measures if m.snr is not None and m.snr[t] > 0), default=None)

    lines = [
        charts.Line(charts.expert_class(t), e.name, [smallest(x, t) for x in layers])
        for t, e in enumerate(diagnosis.experts)
    ]
    values = [v for line in lines for v in line.values if v is not None]
    far = min(values) if values and min(values) >= FAR_ABOVE_ROUNDING else None
    columns = [x.label for x in layers]
    drawn = charts.layer_lines(
        lines, columns, scales.log_axis(values), label="Change over rounding by layer", floor=1.0
    )
    rows = [[x.title, *(scales.number(line.values[i]) for line in lines)] for i, x in enumerate(layers)]
    return {"far": far, "plot": drawn, "table": rows}
