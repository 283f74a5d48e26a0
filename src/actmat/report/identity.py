"""Checks on the identity of base and experts that every merge makes, from hashes and inner products of its records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement

from actmat.diagnostics.checks.deltas import overlap_words
from actmat.diagnostics.checks.merged import unequal_words
from actmat.engine.record import Record
from actmat.planning.item import Item
from actmat.planning.model import FROM_FIRST, FROM_LAST, MergePlan

SAME = 1e-9
"""Squared relative distance of two deltas below which they are equal; inner products have ten digits."""
ROUNDED = 2.0**-16
"""The same of adapters of which some are stored in bfloat16, others not."""

BY_SQUARES = ("actmat", "actmat_ridge")
"""Methods that weight experts by the squares of their sizes."""


def identity_findings(plan: MergePlan, records: Mapping[str, Record]) -> tuple[tuple[str, str], ...]:
    """Codes and words: an expert that is the base, an expert given twice, a base like an expert, unequal sizes."""
    labels = plan.recipe.labels
    rows = [(i, records[i.name]) for i in plan.items if i.action in ("merge", "average") and i.name in records]
    gram = _gram([r.products for _, r in rows if r.products], len(labels))
    measured_from_first = any(n.startswith((FROM_FIRST, FROM_LAST)) for n in plan.recipe.notes)
    zero = [
        label
        for t, label in enumerate(labels)
        if not measured_from_first and _same(rows, -1, t, gram is not None and gram[t][t] == 0)
    ]
    found = []
    if zero:
        names = ", ".join(f"'{label}'" for label in zero)
        models = [e.label in zero and e.kind == "model" for e in plan.experts]
        what = "equals the base" if any(models) else "has a delta of zero (factors or lora_alpha of 0)"
        found.append(("AM201", f"{names} {what}: it changes nothing, and counts in a mean. Check its path, or leave "
                      "it out"))  # fmt: skip
    if gram is not None and len(labels) > 1:
        bound = ROUNDED if len({d for i, _ in rows for d in i.expert_dtypes} - {""}) > 1 else SAME
        bound = SAME if any(e.kind == "model" for e in plan.experts) else bound
        near = [(s, t) for s, t in combinations(range(len(labels)), 2) if _same(rows, s, t, _equal(gram, s, t, bound))]
        twins = [f"'{labels[s]}' and '{labels[t]}'" for s, t in near if labels[s] not in zero]
        if twins:
            found.append(("AM202", f"{'; '.join(twins)} are the same expert, given twice: it counts twice. Leave one "
                          "out, or use weights"))  # fmt: skip
        is_full = plan.base is not None and all(e.kind == "model" for e in plan.experts)
        if is_full and not measured_from_first and (words := overlap_words(labels, gram)):
            found.append(("AM205", words))
        sizes = [math.sqrt(gram[t][t]) for t in range(len(labels))]
        has_weights = any("weight" in e.model_fields_set for e in plan.recipe.experts)
        by_squares = plan.recipe.method in BY_SQUARES and plan.recipe.options.get("normalize", "none") == "none"
        if by_squares and not has_weights and (words := unequal_words(labels, sizes)):
            found.append(("AM301", words))
    return tuple(found)


def _gram(products: Sequence[Sequence[float]], count: int) -> list[list[float]] | None:
    """Sums of the inner products of every two experts."""
    pairs = list(combinations_with_replacement(range(count), 2))
    if not products or any(len(p) != len(pairs) for p in products):
        return None
    out = [[0.0] * count for _ in range(count)]
    for (s, t), column in zip(pairs, zip(*products, strict=True), strict=True):
        out[s][t] = out[t][s] = math.fsum(column)
    return out


def _equal(gram: Sequence[Sequence[float]], s: int, t: int, bound: float) -> bool:
    return gram[s][s] + gram[t][t] - 2 * gram[s][t] <= bound * (gram[s][s] + gram[t][t])


def _same(rows: Sequence[tuple[Item, Record]], s: int, t: int, measured: bool) -> bool:
    """True if two inputs are equal (the base is -1): by the hashes of what both store alike, else as measured."""
    equal = 0
    for item, record in rows:
        if not record.expert_hashes:
            continue
        one, two = (_stored(item, record, k) for k in (s, t))
        if one and two and one[0] == two[0]:
            if one != two:
                return False
            equal += 1
    return measured or (0 < equal == len(rows))


def _stored(item: Item, record: Record, t: int) -> tuple[str, str] | None:
    """dtype and hash of a tensor as an input stores it; the base is -1."""
    if t < 0:
        return item.base_dtype, record.base_hash
    source = item.sources[t]
    return (source.dtype, record.expert_hashes[t]) if source is not None and source.kind == "stored" else None
