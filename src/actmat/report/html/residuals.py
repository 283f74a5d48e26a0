"""Section "Residual by layer": heat maps of layer x expert, and of layer x kind of matrix."""

from __future__ import annotations

from actmat.diagnostics.model import Diagnosis, Measure
from actmat.report.html.elements import section
from actmat.report.html.figures import TENTHS, figure, heat_legend, numbers
from actmat.report.html.layers import kinds, layers_of, residual_over
from actmat.report.html.markup import Markup
from actmat.report.html.scales import residual_level, residual_text
from actmat.report.html.strips import Cell, Strip, largest_strips, strips
from actmat.report.html.words import caveat

__all__ = ["residuals"]

MOST_KINDS = 14


def residuals(diagnosis: Diagnosis) -> Markup:
    """Both heat maps, with the residuals per layer and expert as a table."""
    layers = layers_of(diagnosis.measures)
    columns = [x.label for x in layers]
    legend = heat_legend(TENTHS, "0, as the expert", "1, as the base", ("h0", "above 1"), ("h1", "above 1.25"))
    by_layer = [[residual_over(x.measures, t) for t in range(len(diagnosis.experts))] for x in layers]
    rows = []
    for t, expert in enumerate(diagnosis.experts_summary):
        cells = [
            Cell(residual_level(v[t]), f"{x.title}, {expert.name}: ρ = {residual_text(v[t])}")
            if v[t] is not None
            else None
            for x, v in zip(layers, by_layer, strict=True)
        ]
        rows.append(Strip(expert.name, expert.name, cells, residual_text(expert.residual)))
    table = numbers(
        ["layer", *(e.name for e in diagnosis.experts)],
        ([x.title, *map(residual_text, v)] for x, v in zip(layers, by_layer, strict=True)),
        caption="Residual ρ by layer and expert",
    )
    by_kind = largest_strips(
        kinds(diagnosis.measures, MOST_KINDS),
        [x.depth for x in layers],
        depth=lambda m: m.layer,
        value=lambda m: m.contested,
        cell=lambda m: _worst_cell(diagnosis, m),
        text=residual_text,
    )
    return section(
        "layers",
        "Residual by layer",
        figure(
            "Experts",
            legend,
            strips(rows, columns, x_title="layer", total_title="all"),
            table,
            note="Each cell: all matrices of one layer, for one expert.",
        ),
        figure(
            "Kinds of matrices",
            legend,
            strips(by_kind, columns, x_title="layer", total_title="largest"),
            note="Each cell: the expert that is met least there. Point at a cell to see which.",
        ),
        caveat(),
        lead="Where the experts want different things: the stronger the colour, the further the merged weights are "
        "from what an expert learned there.",
    )


def _worst_cell(diagnosis: Diagnosis, m: Measure) -> Cell:
    expert = diagnosis.experts[m.residual.index(m.contested)].name
    return Cell(residual_level(m.contested), f"{m.label}: {expert}, ρ = {residual_text(m.contested)}")
