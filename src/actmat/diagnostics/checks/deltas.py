"""Checks of the deltas. AM1xx: errors of rounding and quantization; AM2xx: identity of base and experts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from actmat.diagnostics.checks.base import Check, Facts, Outcome, check_of_every_merge, clear, finding, not_applicable

MOST = 0.5
"""Least share of an expert's tensors at which the expert is reported."""

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
        return finding(
            f"Deltas are smaller than half a unit in the last place of the stored weights: {'; '.join(said)}. The "
            "deltas there are mostly rounding. Merge experts saved in float32, or adapters before they are merged in, "
            "and leave out an expert that is the base saved again in another dtype",
            names,
        )
    lowest = min((s for m, snr in rows for s, n in zip(snr, m.norms, strict=True) if n > 0), default=0.0)
    return clear(f"deltas are at least {lowest:.2g} half ulps of the stored weights")


def _quantized(facts: Facts) -> Outcome:
    matrices = {m.name for m in facts.measures}
    samples = {n: s for n, s in facts.samples.items() if n in matrices and s["base_group_levels"] is not None}
    if not samples:
        return not_applicable("no matrix is large enough to count its values")
    said, names = [], []
    for t, label in enumerate(facts.labels):
        hits = [n for n, s in samples.items() if _takes_few_values(s, t)]
        if len(hits) >= MOST * len(samples):
            said.append(f"'{label}' in {len(hits)} of {len(samples)} tensors")
            names += hits
    if said:
        return finding(
            f"{'; '.join(said)}: weights take as few values as a 4- or 8-bit format has: they were quantized and "
            "dequantized, and the delta contains that error. Merge the expert from before its quantization",
            names,
        )
    return clear("weights of experts take as many values as those of the base")


def _takes_few_values(sample: Mapping[str, Any], t: int) -> bool:
    by_group = sample["group_levels"][t] <= FOUR_BIT and sample["base_group_levels"] >= 2 * FOUR_BIT
    by_row = sample["levels"][t] <= EIGHT_BIT and sample["base_levels"] >= 2 * sample["levels"][t]
    return bool(by_group or (by_row and sample["entries"] >= 8 * EIGHT_BIT))


SIGNAL_CHECKS = (
    Check("AM101", "Delta below the rounding of its storage", "issue", _below_rounding),
    Check("AM104", "Expert was quantized", "issue", _quantized),
)


SAME = 1e-6
"""Relative difference of norms, and of a cosine from 1, below which two deltas count as equal."""

FOREIGN = 0.5
"""Relative norm of a delta above which it is not fine-tuning: independent weights of one size differ by 1.4."""

PARALLEL = 0.8
"""Mean cosine above which deltas are mostly one direction; unrelated fine-tunings stay below 0.3."""


def _equal(facts: Facts, s: int, t: int) -> bool:
    rows = [m for m in facts.measures if m.norms[s] > 0 or m.norms[t] > 0]
    return bool(rows) and all(
        m.cosine[s][t] > 1 - SAME and math.isclose(m.norms[s], m.norms[t], rel_tol=SAME) for m in rows
    )


def _foreign(facts: Facts) -> Outcome:
    sizes = [facts.median_relative_norm(t) for t in range(len(facts.labels))]
    if all(s is None for s in sizes):
        return not_applicable("there are no base weights to compare with")
    far = [(label, s) for label, s in zip(facts.labels, sizes, strict=True) if s is not None and s > FOREIGN]
    if far:
        names = "; ".join(f"'{label}' by {size:.2g} of its norm (median)" for label, size in far)
        first = facts.labels.index(far[0][0])
        tensors = [m.name for m in facts.measures if m.relative_norms and m.relative_norms[first] > FOREIGN]
        return finding(
            f"The weights differ from the base as much as unrelated weights do: {names}. These experts do not come "
            "from this base (another size, version or initialization); merging them gives noise",
            tensors,
        )
    largest = max(s for s in sizes if s is not None)
    return clear(f"deltas are at most {largest:.2g} of the base's norm (median over matrices)")


def _shared_direction(facts: Facts) -> Outcome:
    if len(facts.labels) < 2:
        return not_applicable("there is one expert")
    near = []
    highest = 0.0
    for s, t in combinations(range(len(facts.labels)), 2):
        weight = math.fsum(m.norms[s] * m.norms[t] for m in facts.measures)
        if weight == 0 or _equal(facts, s, t):
            continue
        mean = math.fsum(m.cosine[s][t] * m.norms[s] * m.norms[t] for m in facts.measures) / weight
        highest = max(highest, mean)
        if mean > PARALLEL:
            near.append(f"'{facts.labels[s]}' and '{facts.labels[t]}' ({mean:.2f})")
    if near:
        return finding(
            f"Deltas point the same way, mean cosine over {PARALLEL}: {'; '.join(near)}. The experts share a training "
            "stage that the base lacks; with the checkpoint after that stage as the base, their differences would count"
        )
    return clear(f"mean cosines of deltas are at most {highest:.2f}")


IDENTITY_CHECKS = (
    check_of_every_merge("AM201", "Expert equals the base", "issue", "every expert differs from the base"),
    check_of_every_merge("AM202", "Two experts are the same", "issue", "no two experts are the same"),
    Check("AM203", "Expert is not from this base", "issue", _foreign),
    Check("AM204", "Experts share their direction", "tip", _shared_direction),
    check_of_every_merge(
        "AM205", "Base looks like an expert", "tip", "the experts do not share the negative of one change"
    ),
)
