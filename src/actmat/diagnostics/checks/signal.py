"""AM1xx: deltas that are mostly errors of rounding and quantisation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from actmat.diagnostics.checks.base import Check, Facts, Outcome, clear, found, not_applicable

__all__ = ["SIGNAL_CHECKS"]

MOST = 0.5
"""Least share of an expert's tensors at which the expert is reported."""

FEW_VALUES = 8
"""Different magnitudes of a delta; thousands of trained entries take hundreds."""

ENOUGH_MOVED = 256
"""Entries that must have moved before their values are counted."""

FOUR_BIT, EIGHT_BIT = 16.5, 256
"""Most values of a 4-bit format in a group, of an 8-bit format in a row."""


def _below_rounding(facts: Facts) -> Outcome:
    rows = [(m, m.snr) for m in facts.measures if m.snr is not None]
    if not rows:
        return not_applicable("no delta is a difference of stored weights: adapters keep theirs in factors")
    said, names = [], []
    for t, label in enumerate(facts.labels):
        changed = [(m.name, snr[t]) for m, snr in rows if m.norms[t] > 0]
        below = [name for name, snr in changed if snr < 1]
        if changed and len(below) >= MOST * len(changed):
            middle = statistics.median(snr for _, snr in changed)
            said.append(f"'{label}' in {len(below)} of {len(changed)} matrices (median {middle:.2g} half ulps)")
            names += below
    if said:
        return found(
            f"Deltas are smaller than half a unit in the last place of the stored weights: {'; '.join(said)}. What is "
            "merged there is mostly rounding. Merge experts saved in float32, or adapters before they are merged in",
            names,
        )
    lowest = min((s for m, snr in rows for s, n in zip(snr, m.norms, strict=True) if n > 0), default=0.0)
    return clear(f"deltas are at least {lowest:.2g} half ulps of the stored weights")


def _resaved(facts: Facts) -> Outcome:
    seen = {n: s["rounded"] for n, s in facts.samples.items() if any(r is not None for r in s["rounded"])}
    if not seen:
        return not_applicable("every expert is stored in the dtype of the base")
    said, names = [], []
    for t, label in enumerate(facts.labels):
        asked = {n: r[t] for n, r in seen.items() if r[t] is not None}
        same = [n for n, r in asked.items() if r]
        if asked and len(same) == len(asked):
            said.append(f"'{label}'")
            names += same
    if said:
        return found(
            f"{', '.join(said)}: the first entries of every tensor equal the base rounded to another dtype. That is "
            "the base saved again, and its delta is rounding alone; leave the expert out, or find the trained one",
            names,
        )
    return clear("experts in another dtype hold more than a rounded base")


def _few_values(facts: Facts) -> Outcome:
    return _by_expert(
        facts,
        asked=lambda s, t: s["moved"][t] >= ENOUGH_MOVED,
        hit=lambda s, t: s["delta_levels"][t] <= FEW_VALUES,
        nobody="no sample holds enough entries that moved",
        words=f"deltas take at most {FEW_VALUES} different magnitudes: they were compressed, or only the last bit of "
        "the stored weights moved",
        otherwise="deltas take many values",
    )


def _dequantised(facts: Facts) -> Outcome:
    matrices = {m.name for m in facts.measures}
    facts = Facts(facts.labels, (), (), samples={n: s for n, s in facts.samples.items() if n in matrices})
    return _by_expert(
        facts,
        asked=lambda s, t: s["base_group_levels"] is not None,
        hit=_quantised,
        nobody="no matrix is large enough to count its values",
        words="weights take as few values as a 4- or 8-bit format has: they were quantised and expanded again, and the "
        "delta holds the error of that. Merge the expert from before its quantisation",
        otherwise="weights of experts take as many values as those of the base",
    )


def _quantised(sample: Mapping[str, Any], t: int) -> bool:
    by_group = sample["group_levels"][t] <= FOUR_BIT and sample["base_group_levels"] >= 2 * FOUR_BIT
    by_row = sample["levels"][t] <= EIGHT_BIT and sample["base_levels"] >= 2 * sample["levels"][t]
    return bool(by_group or (by_row and sample["entries"] >= 8 * EIGHT_BIT))


def _by_expert(
    facts: Facts,
    *,
    asked: Callable[[Mapping[str, Any], int], bool],
    hit: Callable[[Mapping[str, Any], int], bool],
    nobody: str,
    words: str,
    otherwise: str,
) -> Outcome:
    """Outcome "found" if, for some expert, most of the samples that can show it do."""
    said, names, anybody = [], [], False
    for t, label in enumerate(facts.labels):
        able = [n for n, s in facts.samples.items() if asked(s, t)]
        anybody |= bool(able)
        hits = [n for n in able if hit(facts.samples[n], t)]
        if able and len(hits) >= MOST * len(able):
            said.append(f"'{label}' in {len(hits)} of {len(able)} tensors")
            names += hits
    if said:
        return found(f"{'; '.join(said)}: {words}", names)
    return clear(otherwise) if anybody else not_applicable(nobody)


SIGNAL_CHECKS = (
    Check("AM101", "Delta below the rounding of its storage", "issue", _below_rounding),
    Check("AM102", "Expert is the base in another dtype", "issue", _resaved),
    Check("AM103", "Delta of few values", "tip", _few_values),
    Check("AM104", "Expert was quantised", "issue", _dequantised),
)
