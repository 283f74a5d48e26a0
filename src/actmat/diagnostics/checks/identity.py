"""AM2xx: identity of base and experts."""

from __future__ import annotations

import math
from itertools import combinations

from actmat.diagnostics.checks.base import Check, Facts, Outcome, clear, found, not_applicable

__all__ = ["IDENTITY_CHECKS"]

SAME = 1e-6
"""Relative difference of norms, and of a cosine from 1, below which two deltas are one."""

FOREIGN = 0.5
"""Relative norm of a delta above which it is not fine-tuning: independent weights of one size differ by 1.4."""

PARALLEL = 0.8
"""Mean cosine above which deltas are mostly one direction; unrelated fine-tunings stay below 0.3."""


def _is_base(facts: Facts) -> Outcome:
    tables = facts.norms.values()
    zero = [facts.total_norm(t) == 0 and not any(n["norms"][t] for n in tables) for t in range(len(facts.labels))]
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
            "from this base (another size, version or initialisation); merging them gives noise",
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


def _frozen(facts: Facts) -> Outcome:
    merged = [t for t in facts.tensors if t.action in ("merge", "average")]
    still = [t.name for t in merged if t.unchanged]
    said = [f"{len(still)} of {len(merged)} merged tensors are the base's in every expert"] if still else []
    for t, label in enumerate(facts.labels):
        idle = [m.name for m in facts.measures if m.norms[t] == 0]
        if idle and len(idle) < len(facts.measures):
            said.append(f"'{label}' leaves {len(idle)} of {len(facts.measures)} changed matrices as they are")
            still += idle
    if said:
        return found(f"{'; '.join(said)}. Frozen layers are kept as they are; nothing has to be done", still)
    return clear("every expert changes every merged tensor")


IDENTITY_CHECKS = (
    Check("AM201", "Expert equals the base", "issue", _is_base),
    Check("AM202", "Two experts are the same", "issue", _same_expert),
    Check("AM203", "Expert is not from this base", "issue", _foreign),
    Check("AM204", "Experts share their direction", "tip", _shared_direction),
    Check("AM205", "Frozen layers", "tip", _frozen),
)
