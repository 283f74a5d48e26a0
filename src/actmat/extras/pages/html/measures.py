"""Sections of measures: residuals, overlap of experts, spectra, norms, and change against rounding; sums over matrices.

`T` experts; every vector has `T` entries. Norms add in squares, since matrices are blocks of one long vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from actmat.diagnostics.model import Diagnosis, Matrix, Measure, Vector
from actmat.extras.pages.html.charts import (
    TENTHS,
    Cell,
    Line,
    Strip,
    expert_class,
    figure,
    heat_legend,
    largest_strips,
    layer_lines,
    numbers,
    scree,
    strips,
)
from actmat.extras.pages.html.elements import Child, Markup, caveat, el, long_part, scrollable, section, table
from actmat.extras.pages.html.scales import (
    HeatScale,
    diverging,
    log_axis,
    number,
    percent,
    positive_axis,
    residual_sign,
    residual_text,
    spread,
)
from actmat.report.words import plural


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


def root_sum(norms: Iterable[float]) -> float:
    """Norm of all matrices together, from the norm of each."""
    return math.sqrt(math.fsum(n**2 for n in norms))


def overall_cosine(measures: Sequence[Measure]) -> Matrix:
    """Cosine between whole experts: `sum_m <D_s, D_t> / (||D_s|| ||D_t||)` over all measured matrices; 0 for a zero."""
    size = len(measures[0].norms)
    norms = [root_sum(m.norms[t] for m in measures) for t in range(size)]

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


MOST_KINDS = 14


def residuals(diagnosis: Diagnosis) -> Markup:
    """Both heat maps, with the residuals per layer and expert as a table."""
    layers = layers_of(diagnosis.measures)
    columns = [x.label for x in layers]
    by_layer = [[residual_over(x.measures, t) for t in range(len(diagnosis.experts))] for x in layers]
    values = [v for row in by_layer for v in row if v is not None]
    scale, rows = HeatScale.over(values), []
    for t, expert in enumerate(diagnosis.experts_summary):
        cells = [
            Cell(scale.level(v[t]), f"{x.title}, {expert.name}: ρ {residual_sign(v[t])}") if v[t] is not None else None
            for x, v in zip(layers, by_layer, strict=True)
        ]
        rows.append(Strip(expert.name, expert.name, cells, residual_text(expert.residual)))
    table = numbers(
        ["layer", *(e.name for e in diagnosis.experts)],
        ([x.title, *map(residual_text, v)] for x, v in zip(layers, by_layer, strict=True)),
        caption="Residual ρ by layer and expert",
    )
    worst = [m.contested for m in diagnosis.measures]
    kind_scale = HeatScale.over(worst)
    by_kind = largest_strips(
        kinds(diagnosis.measures, MOST_KINDS),
        [x.depth for x in layers],
        depth=lambda m: m.layer,
        value=lambda m: m.contested,
        cell=lambda m: _worst_cell(diagnosis, m, kind_scale),
        text=residual_text,
    )
    return section(
        "layers",
        "Residual by layer",
        _residual_map(
            "Experts",
            strips(rows, columns, x_title="layer", total_title="all"),
            (values, scale),
            note="Each cell: all matrices of one layer, for one expert.",
            alike="for every expert in every layer",
            table=table,
        ),
        _residual_map(
            "Kinds of matrices",
            strips(by_kind, columns, x_title="layer", total_title="largest"),
            (worst, kind_scale),
            note="Each cell: the expert that is met least there. Point at a cell to see which.",
            alike="for the expert that is met least, in every matrix",
        ),
        caveat(),
        lead="Where the experts want different things: the stronger the colour, the further the merged weights are "
        "from what an expert learned there.",
    )


def _residual_map(
    title: str,
    drawn: Markup,
    scaled: tuple[Sequence[float], HeatScale],
    *,
    note: str,
    alike: str,
    table: Markup | None = None,
) -> Markup:
    """A heat map on the scale of its numbers; one sentence in its place where these are all alike."""
    values, scale = scaled
    if (ends := spread(values)) is not None:
        low, high = map(residual_text, ends)
        said = f"All alike: ρ is {f'{low} to {high}' if low != high else low} {alike}."
        return figure(title, el("p", said), table)
    beyond = [("h0", "above 1"), ("h1", "above 1.25")][: 1 + (max(values) >= 1.25)] if max(values) >= 1 else []
    legend = heat_legend(TENTHS, f"{scale.low:.1f}", f"{scale.high:.1f}", *beyond)
    return figure(title, legend, drawn, table, note=f"{note} ρ = 0: as the expert; 1: as the base.")


def _worst_cell(diagnosis: Diagnosis, m: Measure, scale: HeatScale) -> Cell:
    expert = diagnosis.experts[m.residual.index(m.contested)].name
    return Cell(scale.level(m.contested), f"{m.label}: {expert}, ρ {residual_sign(m.contested)}")


UPRIGHT = 4
"""With more experts than this, names are upright above the columns."""


def overlap(diagnosis: Diagnosis) -> Markup | None:
    """Cosine, subspace overlap against chance, sign conflict; None for one expert."""
    if len(diagnosis.experts) < 2:
        return None
    measures = diagnosis.measures
    shared = overall_share(measures, lambda m: m.subspace_overlap)
    signs = overall_share(measures, lambda m: m.sign_conflict)
    entries = sum(m.shape[0] * m.shape[1] for m in measures)
    chance = sum(m.chance_overlap * m.shape[0] * m.shape[1] for m in measures) / entries
    names = [e.name for e in diagnosis.experts]
    cosines = _square(names, overall_cosine(measures), diverging, lambda v: f"{v:z.2f}", "Cosine between deltas")
    note = "Of whole changes. 0: unrelated; 1: the same direction; below 0: against each other."
    found: list[Child] = [_pairs("Cosine", overall_cosine(measures), lambda v: f"{v:z.2f}", cosines, note)]
    if shared is not None:
        note = "Per cent: how far two experts change the same input directions, weighted by how much; by chance "
        scale = HeatScale.over(_off_diagonal(shared))
        overlaps = _square(names, shared, scale.level, _whole_percent, "Subspace overlap")
        found.append(_pairs("Shared subspace", shared, percent, overlaps, f"{note}{percent(chance)}."))
    if signs is not None:
        note = "Per cent of the entries that two experts move in opposite directions; by chance 50 %."
        scale = HeatScale.over(_off_diagonal(signs))
        conflicts = _square(names, signs, scale.level, _whole_percent, "Sign conflict")
        found.append(_pairs("Sign conflict", signs, percent, conflicts, note))
    return section(
        "overlap",
        "Overlap of experts",
        el("div", *found, class_="squares", style=f"--experts:{len(diagnosis.experts)}"),
        lead="How alike the experts' changes are, over all measured matrices. Experts that "
        "change the same directions in different ways cannot all be met: they interfere.",
    )


def _off_diagonal(values: Matrix) -> list[float]:
    return [v for s, row in enumerate(values) for t, v in enumerate(row) if s != t]


def _pairs(title: str, values: Matrix, text: Callable[[float], str], square: Markup, note: str) -> Markup:
    """A table of pairs; in one sentence, with the table folded, where all pairs are alike."""
    ends = spread(_off_diagonal(values))
    if ends is None:
        return figure(title, square, note=note)
    low, high = map(text, ends)
    if len(values) == 2 or low == high:
        said = f"{'The pair' if len(values) == 2 else 'Every pair'}: {low}."
    else:
        said = f"All pairs are alike: {low} to {high}."
    return figure(title, el("p", said), el("details", el("summary", "The numbers"), square), note=note)


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _square(
    names: Sequence[str],
    values: Matrix,
    colour: Callable[[float | None], str],
    text: Callable[[float], str],
    caption: str,
) -> Markup:
    """A table of experts whose cells are coloured; it is its own table of numbers."""
    head = el("tr", el("td"), *(el("th", el("span", n), scope="col") for n in names))
    rows = []
    for s, name in enumerate(names):
        cells = (
            el("td", text(v), class_="self" if s == t else colour(v), data_tip=f"{name}, {names[t]}: {number(v, 4)}")
            for t, v in enumerate(values[s])
        )
        rows.append(el("tr", el("th", name, scope="row"), *cells))
    class_ = "square upright" if len(names) > UPRIGHT else "square"
    return scrollable(table(head, rows, caption=caption, class_=class_), caption)


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
        long_part(f"The curves of {plural(len(panels), 'kind')} of matrices", el("div", *panels, class_="panels")),
        numbers(head, rows, caption="Spectra of S = Σ DᵀD"),
        lead="How fast the eigenvalues of S = Σ DᵀD fall, relative to the largest: a steep curve means that few input "
        "directions carry most of the change. Where only few carry any, as in adapters, the axis ends with them. A dot "
        f"marks where the rule stopped, if it cuts.{also}",
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


def norms(diagnosis: Diagnosis) -> Markup:
    """Size of the merged change by layer, between the mean and the sum of the experts' changes."""
    layers = layers_of(diagnosis.measures)
    total = [root_sum(m.sum_norm for m in x.measures) for x in layers]
    merged = [root_sum(m.merged_norm for m in x.measures) for x in layers]
    mean = [root_sum(m.mean_norm for m in x.measures) for x in layers]
    lines = [Line("grey", "sum", total), Line("merged thick", "merged", merged), Line("grey dash", "mean", mean)]
    ratios = [m / s if s else None for m, s in zip(merged, total, strict=True)]
    rows = ([x.title, *map(number, row)] for x, *row in zip(layers, total, merged, mean, ratios, strict=True))
    head = ["layer", *(line.name for line in lines), "merged / sum"]
    axis = positive_axis([*total, *merged, *mean])
    return section(
        "norms",
        "Size of the change",
        figure(
            "Frobenius norm ‖D‖ by layer",
            layer_lines(lines, [x.label for x in layers], axis, label="Norms of merged delta, mean and sum by layer"),
            numbers(head, rows, caption="Frobenius norms by layer"),
        ),
        lead="The merged change beside the mean and the sum of the experts' changes. Far above the sum is a sign of an "
        "unstable solve; near the mean, experts were averaged away.",
    )


FAR_ABOVE_ROUNDING = 1e3
"""Change over rounding from which a sentence takes the place of the figure: rounding is a thousandth at most."""


def rounding(diagnosis: Diagnosis) -> Markup | None:
    """Change over half a step of the storage dtype, smallest matrix of each layer; None where it is not known."""
    layers = layers_of(m for m in diagnosis.measures if m.snr is not None)
    if not layers:
        return None

    def smallest(layer: Layer, t: int) -> float | None:
        return min((m.snr[t] for m in layer.measures if m.snr is not None and m.snr[t] > 0), default=None)

    lines = [Line(expert_class(t), e.name, [smallest(x, t) for x in layers]) for t, e in enumerate(diagnosis.experts)]
    values = [v for line in lines for v in line.values if v is not None]
    columns = [x.label for x in layers]
    rows = ([x.title, *(number(line.values[i]) for line in lines)] for i, x in enumerate(layers))
    head = ["layer", *(e.name for e in diagnosis.experts)]
    title, table = "Smallest of each layer", numbers(head, rows, caption="Smallest change over rounding, by layer")
    if values and min(values) >= FAR_ABOVE_ROUNDING:
        said = f"No layer is near the limit of 1: every change is at least {number(min(values))} times its rounding."
        drawn = figure(title, el("p", said), table)
    else:
        lines_drawn = layer_lines(lines, columns, log_axis(values), label="Change over rounding by layer", floor=1.0)
        note = "Logarithmic. In the shaded ground, below 1, rounding is larger than the change."
        drawn = figure(title, lines_drawn, table, note=note)
    return section(
        "rounding",
        "Change against rounding",
        drawn,
        lead="Root mean square of each expert's change over half a unit in the last place of the base's weights, "
        f"stored as {' and '.join(diagnosis.storage_dtypes)}. Below 1, most of a change was rounded away when the "
        "expert was saved.",
    )
