"""The bars, set before anything was measured, and which rules and lengths pass them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.datafree.picks import (
    SEES_DATA,
    Merge,
    Pick,
    Row,
    average,
    chosen_on,
    found,
    has,
    is_lora,
    least_noise,
    least_of_all,
    length_picks,
    lengthened,
    measured_lengths,
    pooled,
    rules_of,
)

GAIN_LORA, GAIN_FULL, LOSS = 1.0, 2.0, 0.5
"""Points."""
NEAREST = 8
TWO = ("average", "tsv")
"""Rules that were put together after the first pretrained subjects had been looked at; they need two merges only."""


def every_pick(rows: Sequence[Row]) -> dict[str, Pick]:
    """All rules and lengths without data that every one of the subjects has."""
    picks: dict[str, Pick] = {
        f"`{rule}`": (lambda r, n=rule: found(r, n))
        for rule in rules_of(rows)
        if not rule.startswith(SEES_DATA) and all(has(row, rule) for row in rows)
    }
    for rule in lengthened(rows):
        for name, pick in length_picks(rows, rule).items():
            if not name.startswith("*") and measured_lengths(rows, rule, name):
                picks[f"`{rule}` x {name}"] = pick
    if all(measured_lengths(rows, rule, "least divergence on noise") for rule in TWO):
        picks["`average` or `tsv` x least divergence on noise"] = least_noise(*TWO)
    return picks | {"any rule x least divergence on noise": least_of_all}


def verdict(rows: Sequence[Row]) -> str:
    """Which rules and lengths pass the bars on the subjects that confirm, in words."""
    rest = [row for row in rows if not chosen_on(row)]
    lora, full = [r for r in rest if is_lora(r)], [r for r in rest if not is_lora(r)]
    if not lora or not full:
        return "*Not measured yet.*\n"
    lines = []
    for kind, some, passes in (("LoRA", lora, _passes_lora), ("full fine-tuning", full, _passes_full)):
        for where, part in _parts_of(some).items():
            picks = every_pick(part)
            passed = [name for name, pick in picks.items() if passes(part, pick)]
            said = f"{', '.join(passed)} pass{'es' if len(passed) == 1 else ''}" if passed else "none passes"
            lines.append(f"* {kind}, {where}: of {len(picks)} rules and lengths without data, {said}.")
    return "\n".join(lines) + "\n"


def _parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Subjects that are judged together: each kind of base, and all of them."""
    digits = [r for r in rows if r["suite"] == "digits"]
    others = [r for r in rows if r["suite"] != "digits"]
    named = {f"the {len(digits)} subjects of digits": digits, f"the {len(others)} on pretrained bases": others}
    kept = {name: some for name, some in named.items() if some}
    return kept | ({f"all {len(rows)} subjects": list(rows)} if len(kept) > 1 else {})


def near_rows(rows: Sequence[Row], lora: bool) -> list[list[str]]:
    """The rules and lengths nearest to their bar, on all subjects that confirm: gains and lowest subjects."""
    some = [r for r in rows if is_lora(r) == lora and not chosen_on(r)]
    out = []
    for name, pick in every_pick(some).items() if some else ():
        if name in ("`average`", "`actmat`") or name.endswith(" x one"):
            continue  # what others are compared with, and second names
        to = average if lora else _actmat
        centre, half, _ = pooled(some, pick, to)
        floor = pooled(some, pick, average if lora else _better)[2]
        out.append((centre, [name, f"{centre:+.1f} ±{half:.1f}", f"{floor:+.1f}"]))
    return [line for _, line in sorted(out, key=lambda pair: -pair[0])][:NEAREST]


def _passes_lora(rows: Sequence[Row], pick: Pick) -> bool:
    centre, _, worst = pooled(rows, pick)
    return centre >= GAIN_LORA and worst >= -LOSS


def _actmat(row: Row) -> Merge:
    return found(row, "actmat")


def _better(row: Row) -> Merge:
    return max((found(row, n) for n in ("average", "tsv")), key=lambda m: mean(m["test"].values()))


def _passes_full(rows: Sequence[Row], pick: Pick) -> bool:
    gain = pooled(rows, pick, _actmat)[0]
    return gain >= GAIN_FULL and pooled(rows, pick, _better)[2] >= -LOSS
