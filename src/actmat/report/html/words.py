"""Words shared by the sections."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.report.html.markup import Markup, el

__all__ = ["CAVEAT", "caveat", "listed", "plural", "shape_text"]

CAVEAT = (
    "The residual ρ checks the solution: whether the merged weights do what the rule asked of them on each expert's "
    "own directions. It is not a forecast of quality. A small ρ does not promise a good model, nor does a large one "
    "forbid it; only an evaluation on your tasks can tell."
)
"""Every table and figure of residuals shows it."""


def caveat(role: str | None = None) -> Markup:
    """The caveat as a paragraph."""
    return el("p", CAVEAT, class_="caveat", role=role)


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(words: Sequence[str], most: int = 8) -> str:
    """`a, b and c`; words beyond `most` are counted."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shape_text(shape: Sequence[int]) -> str:
    """`64×32`, or `scalar`."""
    return "×".join(map(str, shape)) or "scalar"
