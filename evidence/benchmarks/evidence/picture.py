"""The picture of the README: accuracy of base, average, `auto`, RegMean and experts, on bases that chose nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

from actmat.run.automatic import GENTLE, HOT
from benchmarks.evidence.choice import IN_FORCE, WITH_INPUTS, HeldOut, by_base, form_of, held_out, mean_of
from benchmarks.evidence.intervals import Interval

WIDTH, EDGE, TOP, ROW = 440, 16, 84, 37
"""Pixels, as shown by a telephone: width, margin, the first row, and the distance of rows."""
LOW, HIGH = 10, 90
"""Accuracies in % at the ends of the scale."""
WORDS = {"base": "base", "average": "average", "auto": "auto", "regmean": "with inputs", "experts": "each expert"}
FORMS = {
    "full": "full fine-tuning",
    "gentle": f"LoRA below {100 * GENTLE:.1g} %",
    "adapters": f"LoRA, {100 * GENTLE:.1g} to {100 * HOT:.1g} %",
    "other": "LoRA, larger or from one A",
}
"""Form of a set -> its words."""
STYLE = f"<style>\n{Path(__file__).with_name('picture.css').read_text()}</style>"


def picture() -> str:
    """An SVG with two lines per base and kind of experts; a gain whose interval has 0 in it is gray."""
    kinds: dict[tuple[str, str], list[HeldOut]] = {}
    for held in (h for h in held_out() if h.one.gains(h.row)):
        kinds.setdefault((held.one.base, FORMS[form_of(held.one, IN_FORCE)]), []).append(held)
    rows = []
    for (base, kind), some in kinds.items():
        own = by_base(some)[base]
        assert own.gain is not None
        text = Interval(own.gain, None if math.isnan(own.half) else own.half, 0).text(sign=True)
        sets = f" ({len(some)} sets)" if len(some) > 1 else ""
        rows.append((f"{base}, {kind}{sets}", text, _accuracies(some)))
    order = list(FORMS.values())
    rows.sort(key=lambda row: next(n for n, kind in enumerate(order) if kind in row[0]))
    height = TOP + ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 1.25:.0f}" '
        f'height="{height * 1.25:.0f}" font-family="system-ui, sans-serif" font-size="13">{STYLE}',
        f'<rect width="{WIDTH}" height="{height}"/>',
        _text(EDGE, 22, "Test accuracy in %, mean over tasks and seeds", "strong"),
    ]
    for (name, word), x in zip(WORDS.items(), (EDGE + 6, 84, 166, 226, 328), strict=True):
        parts += [_mark(name, x, 42), _text(x + 12, 46, word)]
    for accuracy in range(20, HIGH + 1, 20):
        at = _place(accuracy)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP - 14}" x2="{at:.1f}" y2="{height - 20}"/>')
        parts.append(_text(at, height - 6, str(accuracy), "muted", anchor="middle"))
    parts.append(_text(WIDTH - EDGE, TOP - 16, "auto - average, points", "muted", anchor="end"))
    for number, row in enumerate(rows):
        parts += _row(TOP + ROW * number, *row)
    return "\n".join([*parts, "</svg>", ""])


def _accuracies(some: Sequence[HeldOut]) -> dict[str, float]:
    """Means over sets, in the seeds that `auto` has; merges with inputs by their gain where they were made."""
    found: dict[str, list[float]] = {}
    gains = []
    for held in some:
        seeds, average = held.one.group.points(held.row), held.one.group.points("average")
        for word, row in (("base", "base"), ("average", "average"), ("auto", held.row), ("experts", "experts")):
            found.setdefault(word, []).append(mean_of(held.one.group.points(row), seeds))
        for points in filter(None, map(held.one.group.points, WITH_INPUTS)):
            if points.keys() >= seeds.keys():
                gains.append(mean_of(points, seeds) - mean_of(average, seeds))
    places = {word: mean(values) for word, values in found.items()}
    return places | ({"regmean": places["average"] + mean(gains)} if gains else {})


def _place(accuracy: float) -> float:
    return EDGE + (accuracy - LOW) / (HIGH - LOW) * (WIDTH - 2 * EDGE)


def _row(y: float, title: str, gain: str, found: Mapping[str, float]) -> list[str]:
    places = {name: _place(value) for name, value in found.items()}
    line = f'<line class="way" x1="{places["base"]:.1f}" y1="{y + 20}" x2="{places["experts"]:.1f}" y2="{y + 20}"/>'
    marks = [_mark(name, x, y + 20) for name, x in places.items()]
    kind = "muted" if _holds_zero(gain) else ""
    return [_text(EDGE, y + 8, title), _text(WIDTH - EDGE, y + 8, gain, kind, anchor="end"), line, *marks]


def _holds_zero(gain: str) -> bool:
    """True for `+0.6 ±0.9`, whose interval has 0 in it.

    >>> _holds_zero("+0.6 ±0.9"), _holds_zero("+10.0 ±7.0"), _holds_zero("+59.4 (57 to 62 by seed)")
    (True, False, False)
    """
    found = re.fullmatch(r"([+-][\d.]+) ±([\d.]+)", gain)
    return found is not None and abs(float(found[1])) <= float(found[2])


def _mark(name: str, x: float, y: float) -> str:
    if name in ("base", "experts"):
        return f'<line class="{name}" x1="{x:.1f}" y1="{y - 7}" x2="{x:.1f}" y2="{y + 7}" stroke-width="3"/>'
    return f'<circle class="{name}" cx="{x:.1f}" cy="{y}" r="6" fill-opacity="0.9"/>'


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
