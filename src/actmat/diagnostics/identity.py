"""Checks on the identity of base and experts that every merge makes, from hashes and inner products of its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from actmat.engine.record import Record
from actmat.planning.item import Item
from actmat.planning.model import MergePlan

SAME = 1e-9
"""Squared relative distance of two deltas below which they are equal; inner products have ten digits."""
ROUNDED = 2.0**-16
"""The same of adapters of which some are stored in bfloat16, others not."""
ALIKE = 1e-6
"""Distance of a cosine from 1 below which two deltas count as one."""
FOREIGN = 0.5
"""Relative norm of a delta above which it is not fine-tuning: independent weights of one size differ by 1.4."""
SHARED = 0.4
"""Cosine of every two deltas above which they share a change; from a base that is an expert it is about 0.5."""
WHOLE_SHARE = 0.2
"""Distance from 1 of the share of one delta that the others hold in full."""
UNEQUAL = 2.0
"""Norm of the largest expert against the smallest's; what was measured from here on stands in docs/evidence.md."""
BASE = -1
"""Number of the base among the inputs; experts count from 0."""

BY_SQUARES = ("actmat", "actmat_ridge")
"""Methods that weight experts by the squares of their sizes."""


def identity_findings(plan: MergePlan, records: Mapping[str, Record]) -> tuple[tuple[str, str], ...]:
    """Codes and words; what follows from an expert of another base is not said as well."""
    rows = [(i, records[i.name]) for i in plan.items if i.action in ("merge", "average") and i.name in records]
    merge = _MergedInputs(plan, rows, _gram([r.products for _, r in rows if r.products], len(plan.recipe.labels)))
    checks = {
        "AM201": merge.without_effect,
        "AM202": merge.given_twice,
        "AM203": merge.from_another_base,
        "AM205": merge.with_other_base,
        "AM301": merge.of_unequal_size,
    }
    found = {code: words for code, check in checks.items() if (words := check())}
    return tuple(item for item in found.items() if item[0] <= "AM203" or "AM203" not in found.keys() - plan.recipe.mute)


@dataclass(frozen=True)
class _MergedInputs:
    """A merge with what its records tell of its inputs. Each check gives words for what it has found, if anything.

    Args:
        rows: items that merge experts, with their records.
        gram: inner products of the experts' deltas; None if they were not computed.
    """

    plan: MergePlan
    rows: Sequence[tuple[Item, Record]]
    gram: Sequence[Sequence[float]] | None

    def without_effect(self) -> str:
        """Experts that equal the base."""
        if not (zero := self._zero()):
            return ""
        has_models = any(e.label in zero and e.kind == "model" for e in self.plan.experts)
        what = "equals the base" if has_models else "has a delta of zero (factors or lora_alpha of 0)"
        names = ", ".join(f"'{label}'" for label in zero)
        return f"{names} {what}: it changes nothing, and counts in a mean. Check its path, or leave it out"

    def given_twice(self) -> str:
        """Pairs of equal experts."""
        if self.gram is None:
            return ""
        labels, zero, gram = self.plan.recipe.labels, self._zero(), self.gram
        dtypes = {d for item, _ in self.rows for d in item.expert_dtypes} - {""}
        bound = ROUNDED if len(dtypes) > 1 and not any(e.kind == "model" for e in self.plan.experts) else SAME
        twins = []
        for s, t in combinations(range(len(labels)), 2):
            sizes = gram[s][s] + gram[t][t]
            is_near = sizes - 2 * gram[s][t] <= bound * sizes
            if labels[s] not in zero and _are_same(self.rows, s, t, measured=is_near):
                twins.append(f"'{labels[s]}' and '{labels[t]}'")
        words = "are the same expert, given twice: it counts twice. Leave one out, or use weights"
        return f"{'; '.join(twins)} {words}" if twins else ""

    def from_another_base(self) -> str:
        """Experts whose weights differ from the base's as those of independent models do."""
        sizes = [r.size for i, r in self.rows if r.size and r.size["base_norm"] and len(i.shape) > 1]
        far = []
        for t, label in enumerate(self.plan.recipe.labels):
            changes = [s["expert_norms"][t] / s["base_norm"] for s in sizes if s["expert_norms"][t]]
            if changes and (middle := statistics.median(changes)) > FOREIGN:
                far.append(f"'{label}' by {middle:.2g}")
        words = (
            f"as far from {self.plan.recipe.measured_from or 'the base'} as unrelated weights are: {', '.join(far)} "
            "of its norm (median). An expert that was not trained from it (another size, version or initialization) "
            "adds noise. Fix: give the base that all experts were trained from, or leave the expert out"
        )
        return words if far else ""

    def with_other_base(self) -> str:
        """A base that looks like an expert."""
        is_full = self.plan.base is not None and all(e.kind == "model" for e in self.plan.experts)
        if self.gram is None or len(self.gram) < 2 or not is_full or self.plan.recipe.measured_from:
            return ""
        return _overlap_words(self.plan.recipe.labels, self.gram)

    def of_unequal_size(self) -> str:
        """Experts of which some are much larger than others, for a method that counts them by the squares."""
        recipe = self.plan.recipe
        has_weights = any("weight" in e.model_fields_set for e in recipe.experts)
        by_squares = recipe.method in BY_SQUARES and recipe.options.get("normalize", "none") == "none"
        if self.gram is None or len(self.gram) < 2 or not by_squares or has_weights:
            return ""
        return _unequal_words(recipe.labels, [math.sqrt(row[t]) for t, row in enumerate(self.gram)])

    def _zero(self) -> list[str]:
        """Labels of experts that equal the base; none where an expert stands in for it."""
        if self.plan.recipe.measured_from:
            return []
        norms = [None if self.gram is None else self.gram[t][t] for t in range(len(self.plan.recipe.labels))]
        is_zero = (_are_same(self.rows, BASE, t, measured=norm == 0) for t, norm in enumerate(norms))
        return [label for label, zero in zip(self.plan.recipe.labels, is_zero, strict=True) if zero]


def _overlap_words(labels: Sequence[str], gram: Sequence[Sequence[float]]) -> str:
    """The finding that all deltas share one change, from their inner products; empty if they do not.

    From a base that is an expert, every delta has the negative of its change; that of the true base has nothing else.
    """
    changed = [t for t in range(len(labels)) if gram[t][t] > 0]
    pairs = list(combinations(changed, 2))
    cosines = [gram[s][t] / math.sqrt(gram[s][s] * gram[t][t]) for s, t in pairs]
    if not pairs or min(cosines) < SHARED or 1 - max(cosines) < ALIKE:
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


def _unequal_words(labels: Sequence[str], norms: Sequence[float]) -> str:
    """Sentence on experts of unequal size; empty if they are not."""
    present = [t for t, n in enumerate(norms) if n > 0] or [0]
    low, top = min(present, key=norms.__getitem__), max(present, key=norms.__getitem__)
    if norms[top] <= UNEQUAL * norms[low]:
        return ""
    return (
        f"'{labels[top]}' changed the base {norms[top] / norms[low]:.2g} times as much as '{labels[low]}'. actmat and "
        f"actmat_ridge weight experts by the square of that, and little may be left of '{labels[low]}': compare with "
        "tsv or the average, or give weights"
    )


def _gram(products: Sequence[Sequence[float]], count: int) -> list[list[float]] | None:
    """Sums of the inner products of every two experts."""
    pairs = list(combinations_with_replacement(range(count), 2))
    if not products or any(len(p) != len(pairs) for p in products):
        return None
    out = [[0.0] * count for _ in range(count)]
    for (s, t), column in zip(pairs, zip(*products, strict=True), strict=True):
        out[s][t] = out[t][s] = math.fsum(column)
    return out


def _are_same(rows: Sequence[tuple[Item, Record]], s: int, t: int, *, measured: bool) -> bool:
    """True if two inputs are equal: by the hashes of what both store alike, else as measured."""
    equal = 0
    for item, record in (row for row in rows if row[1].expert_hashes):
        first, second = (_stored(item, record, k) for k in (s, t))
        if first and second and first[0] == second[0]:
            if first != second:
                return False
            equal += 1
    return measured or (0 < equal == len(rows))


def _stored(item: Item, record: Record, t: int) -> tuple[str, str] | None:
    """dtype and hash of a tensor as an input stores it."""
    if t == BASE:
        return item.base_dtype, record.base_hash
    source = item.sources[t]
    return (source.dtype, record.expert_hashes[t]) if source is not None and source.kind == "stored" else None
