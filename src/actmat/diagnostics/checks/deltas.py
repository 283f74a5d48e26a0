"""Checks of the deltas. AM1xx: errors of rounding and quantization; AM2xx: identity of base and experts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from actmat.diagnostics.checks.base import Check, Facts, Outcome, clear, found, not_applicable

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
        return found(
            f"Deltas are smaller than half a unit in the last place of the stored weights: {'; '.join(said)}. The "
            "deltas there are mostly rounding. Merge experts saved in float32, or adapters before they are merged in",
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
            f"{', '.join(said)}: the first entries of every tensor equal the base rounded to another dtype. It is "
            "the base saved again, and its delta is only rounding error; leave the expert out, or find the trained one",
            names,
        )
    return clear("experts in another dtype hold more than a rounded base")


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
        return found(
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
    Check("AM102", "Expert is the base in another dtype", "issue", _resaved),
    Check("AM104", "Expert was quantized", "issue", _quantized),
)


SAME = 1e-6
"""Relative difference of norms, and of a cosine from 1, below which two deltas count as equal."""

FOREIGN = 0.5
"""Relative norm of a delta above which it is not fine-tuning: independent weights of one size differ by 1.4."""

PARALLEL = 0.8
"""Mean cosine above which deltas are mostly one direction; unrelated fine-tunings stay below 0.3."""


SHARED = 0.4
"""Cosine of every two deltas above which they share a change; from a base that is an expert it is about 0.5."""

WHOLE_SHARE = 0.2
"""Distance from 1 of the share of one delta that the others hold in full."""


def _is_base(facts: Facts) -> Outcome:
    tables = [r.stats["norms"] for r in facts.tensors if "norms" in r.stats]
    zero = [facts.total_norm(t) == 0 and not any(n[t] for n in tables) for t in range(len(facts.labels))]
    if any(zero):
        names = ", ".join(f"'{label}'" for label, is_zero in zip(facts.labels, zero, strict=True) if is_zero)
        return found(
            f"{names}: no merged tensor differs from the base. The expert adds nothing, and still counts in a mean; "
            "check its path, or leave it out"
        )
    return clear("every expert differs from the base")


def _same_expert(facts: Facts) -> Outcome:
    if len(facts.labels) < 2:
        return not_applicable("there is one expert")
    pairs = combinations(range(len(facts.labels)), 2)
    twins = [f"'{facts.labels[s]}' and '{facts.labels[t]}'" for s, t in pairs if _equal(facts, s, t)]
    if twins:
        return found(
            f"{'; '.join(twins)}: the same deltas in every matrix. One checkpoint is given twice, and counts twice; "
            "leave one out, or use weights if that is meant"
        )
    return clear("no two experts are the same")


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
        return found(
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
        return found(
            f"Deltas point the same way, mean cosine over {PARALLEL}: {'; '.join(near)}. The experts share a training "
            "stage that the base lacks; with the checkpoint after that stage as the base, their differences would count"
        )
    return clear(f"mean cosines of deltas are at most {highest:.2f}")


def _base_is_expert(facts: Facts) -> Outcome:
    if len(facts.labels) < 2:
        return not_applicable("there is one expert")
    count = range(len(facts.labels))
    rows = [(m.cosine, m.norms) for m in facts.measures if m.snr is not None]
    if not rows:
        return not_applicable("no delta is a difference of stored weights, so that none holds the base's change")
    gram = [[math.fsum(cos[s][t] * n[s] * n[t] for cos, n in rows) for t in count] for s in count]
    said = overlap_words(facts.labels, gram)
    return found(said) if said else clear("the experts do not share the negative of one change")


def overlap_words(labels: Sequence[str], gram: Sequence[Sequence[float]]) -> str:
    """The finding that all deltas share one change, from their inner products; empty if they do not.

    From a base that is an expert, every delta has the negative of its change; that of the true base has nothing else.
    """
    changed = [t for t in range(len(labels)) if gram[t][t] > 0]
    pairs = list(combinations(changed, 2))
    cosines = [gram[s][t] / math.sqrt(gram[s][s] * gram[t][t]) for s, t in pairs]
    if not pairs or min(cosines) < SHARED or 1 - max(cosines) < SAME:
        return ""
    low, high = min(cosines), max(cosines)
    overlap = f"the deltas of all experts overlap (cosines {low:.2f} to {high:.2f}; unrelated ones stay below 0.3)"
    origins = [s for s in changed if all(abs(gram[s][t] / gram[s][s] - 1) < WHOLE_SHARE for t in changed)]
    if len(origins) == 1:
        name = labels[origins[0]]
        return (
            f"{overlap}: seen from '{name}', the others change unrelated directions. The base looks like an expert, "
            f"and '{name}' like the base, or the others were trained from it. Fix: give '{name}' as the base"
        )
    return (
        f"{overlap}: the base looks like an expert, whose negative all deltas hold, or the experts share training that "
        "the base lacks. Fix: give the checkpoint that all of them were trained from as the base"
    )


IDENTITY_CHECKS = (
    Check("AM201", "Expert equals the base", "issue", _is_base),
    Check("AM202", "Two experts are the same", "issue", _same_expert),
    Check("AM203", "Expert is not from this base", "issue", _foreign),
    Check("AM204", "Experts share their direction", "tip", _shared_direction),
    Check("AM205", "Base looks like an expert", "tip", _base_is_expert),
)
