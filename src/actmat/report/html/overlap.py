"""Section "Overlap of experts": tables of expert x expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actmat.diagnostics.model import Diagnosis, Matrix
from actmat.report.html.elements import scrollable, section, table
from actmat.report.html.figures import figure
from actmat.report.html.layers import overall_cosine, overall_share
from actmat.report.html.markup import Child, Markup, el
from actmat.report.html.scales import diverging, number, percent, sequential

__all__ = ["overlap"]

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
    found: list[Child] = [
        figure(
            "Cosine",
            _square(names, overall_cosine(measures), diverging, lambda v: f"{v:z.2f}", "Cosine between deltas"),
            note="Of whole changes. 0: unrelated; 1: the same direction; below 0: against each other.",
        )
    ]
    if shared is not None:
        found.append(
            figure(
                "Shared subspace",
                _square(names, shared, sequential, _whole_percent, "Subspace overlap"),
                note="Per cent: how far two experts change the same input directions, weighted by how much; by "
                f"chance {percent(chance)}.",
            )
        )
    if signs is not None:
        found.append(
            figure(
                "Sign conflict",
                _square(names, signs, sequential, _whole_percent, "Sign conflict"),
                note="Per cent of the entries that two experts move in opposite directions; by chance 50 %.",
            )
        )
    return section(
        "overlap",
        "Overlap of experts",
        el("div", *found, class_="squares", style=f"--experts:{len(diagnosis.experts)}"),
        lead="How alike the experts' changes are, over all measured matrices. What overlaps and disagrees, interferes.",
    )


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
