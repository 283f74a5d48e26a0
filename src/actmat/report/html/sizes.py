"""Sections "Size of the change" and "Change against rounding": lines over layers."""

from __future__ import annotations

from actmat.diagnostics.model import Diagnosis
from actmat.report.html.elements import section
from actmat.report.html.figures import expert_class, figure, line_legend, numbers
from actmat.report.html.layers import Layer, layers_of, root_sum
from actmat.report.html.lines import Line, layer_lines
from actmat.report.html.markup import Markup
from actmat.report.html.scales import log_axis, number, positive_axis

__all__ = ["norms", "rounding"]


def norms(diagnosis: Diagnosis) -> Markup:
    """Size of the merged change by layer, between the mean and the sum of the experts' changes."""
    layers = layers_of(diagnosis.measures)
    total = [root_sum(m.sum_norm for m in x.measures) for x in layers]
    merged = [root_sum(m.merged_norm for m in x.measures) for x in layers]
    mean = [root_sum(m.mean_norm for m in x.measures) for x in layers]
    lines = [Line("e0", "sum of deltas", total), Line("e1 thick", "merged", merged), Line("e2", "mean of deltas", mean)]
    ratios = [m / s if s else None for m, s in zip(merged, total, strict=True)]
    rows = ([x.title, *map(number, row)] for x, *row in zip(layers, total, merged, mean, ratios, strict=True))
    head = ["layer", *(line.name for line in lines), "merged / sum"]
    axis = positive_axis([*total, *merged, *mean])
    return section(
        "norms",
        "Size of the change",
        figure(
            "Frobenius norm ‖D‖ by layer",
            line_legend((line.style, line.name) for line in lines),
            layer_lines(lines, [x.label for x in layers], axis, label="Norms of merged delta, mean and sum by layer"),
            numbers(head, rows, caption="Frobenius norms by layer"),
        ),
        lead="The merged change beside the mean and the sum of the experts' changes. Far above the sum is a sign of an "
        "unstable solve; near the mean, experts were averaged away.",
    )


def rounding(diagnosis: Diagnosis) -> Markup | None:
    """Change over half a step of the storage dtype, smallest matrix of each layer; None where it is not known."""
    layers = layers_of(m for m in diagnosis.measures if m.snr is not None)
    if not layers:
        return None

    def smallest(layer: Layer, t: int) -> float | None:
        return min((m.snr[t] for m in layer.measures if m.snr is not None and m.snr[t] > 0), default=None)

    lines = [Line(expert_class(t), e.name, [smallest(x, t) for x in layers]) for t, e in enumerate(diagnosis.experts)]
    axis = log_axis([v for line in lines for v in line.values if v is not None])
    columns = [x.label for x in layers]
    rows = ([x.title, *(number(line.values[i]) for line in lines)] for i, x in enumerate(layers))
    head = ["layer", *(e.name for e in diagnosis.experts)]
    return section(
        "rounding",
        "Change against rounding",
        figure(
            "Smallest of each layer",
            line_legend((line.style, line.name) for line in lines),
            layer_lines(lines, columns, axis, label="Change over rounding noise by layer", floor=1.0),
            numbers(head, rows, caption="Smallest change over rounding noise, by layer"),
            note="Logarithmic. In the shaded ground, below 1, rounding is larger than the change.",
        ),
        lead="Root mean square of each expert's change over half a unit in the last place of the base's weights, "
        f"stored as {' and '.join(diagnosis.storage_dtypes)}. Below 1, most of a change was rounded away when the "
        "expert was saved.",
    )
