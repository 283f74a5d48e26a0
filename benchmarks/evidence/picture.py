"""The picture of the README: test accuracy of base, average, `auto` and experts, each on a base that chose nothing."""

from __future__ import annotations

import re
from html import escape
from statistics import mean

from benchmarks.evidence.choice import held_out
from benchmarks.evidence.intervals import Points, paired

LEFT, RIGHT, TOP, ROW = 230, 640, 74, 34
"""Pixels: the ends of the scale of accuracies, the first row, and the distance of rows."""
WIDTH = 950
LOW, HIGH = 10, 100
"""Accuracies in % at the ends of the scale."""
COLORS = {"base": "#8a8f98", "average": "#c98a1b", "auto": "#1f5fa8", "experts": "#222222"}
MUTED = "#8a8f98"


def picture() -> str:
    """An SVG with a row per set, of the table that was chosen without its base; a gain whose interval has 0 is gray."""
    rows = []
    for held in held_out():
        points, average = held.one.group.points(held.row), held.one.group.points("average")
        if (gap := paired(points, average)) is not None and held.one.group.seeds != [10]:
            names = ("base", "average", held.row, "experts")
            values = [_accuracy(held.one.group.points(name)) for name in names]
            rows.append((_short(held.one.title), held.row, gap.text(sign=True), values))
    rows.sort(key=lambda row: "LoRA" in row[0])
    height = TOP + ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
        *_scale(height),
    ]
    for number, row in enumerate(rows):
        parts += _row(TOP + ROW * number + ROW / 2, *row)
    return "\n".join([*parts, "</svg>", ""])


def _short(title: str) -> str:
    """The title without the form in which the base's weights were found; full fine-tuning in one word."""
    return title.replace("-Instruct from Q4_1", "").replace("full fine-tuning", "full")


def _accuracy(points: Points) -> float:
    return mean(value for tasks in points.values() for value in tasks.values())


def _place(accuracy: float) -> float:
    return LEFT + (accuracy - LOW) / (HIGH - LOW) * (RIGHT - LEFT)


def _legend() -> list[str]:
    words = ("base", "average of the experts", "merge by auto", "each expert alone")
    places = (LEFT, LEFT + 66, LEFT + 236, LEFT + 366)
    parts = [
        _text(16, 24, "Test accuracy in %", weight="bold"),
        _text(16, 42, "mean over tasks and seeds", color=MUTED),
    ]
    for (name, word), x in zip(zip(COLORS, words, strict=True), places, strict=True):
        parts += [_mark(name, x, 20), _text(x + 10, 24, word)]
    return [*parts, _text(RIGHT + 30, 54, "auto - average, points", weight="bold")]


def _scale(height: float) -> list[str]:
    parts = []
    for accuracy in range(20, HIGH + 1, 20):
        x = _place(accuracy)
        parts.append(f'<line x1="{x:.1f}" y1="62" x2="{x:.1f}" y2="{height - 24}" stroke="#e4e6ea"/>')
        parts.append(_text(x, 54, str(accuracy), anchor="middle", color=MUTED))
    return parts


def _row(y: float, title: str, method: str, gain: str, values: list[float]) -> list[str]:
    base, _, _, experts = values
    left, right = sorted((_place(base), _place(experts)))
    line = f'<line x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" stroke="#c9cdd3" stroke-width="2"/>'
    marks = [_mark(name, _place(value), y) for name, value in zip(COLORS, values, strict=True)]
    color = MUTED if _holds_zero(gain) else COLORS["auto"]
    return [_text(16, y + 4, title), line, *marks, _text(RIGHT + 30, y + 4, f"{gain}, {method}", color=color)]


def _holds_zero(gain: str) -> bool:
    """True for `+0.6 ±0.9`, whose interval has 0 in it.

    >>> _holds_zero("+0.6 ±0.9"), _holds_zero("+10.0 ±7.0"), _holds_zero("+59.4 (57 to 62 by seed)")
    (True, False, False)
    """
    found = re.fullmatch(r"([+-][\d.]+) ±([\d.]+)", gain)
    return found is not None and abs(float(found[1])) <= float(found[2])


def _mark(name: str, x: float, y: float) -> str:
    color = COLORS[name]
    if name in ("base", "experts"):
        return f'<line x1="{x:.1f}" y1="{y - 8}" x2="{x:.1f}" y2="{y + 8}" stroke="{color}" stroke-width="3"/>'
    return f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="{color}" fill-opacity="0.9"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "#222222", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(text)}</text>'
    )
