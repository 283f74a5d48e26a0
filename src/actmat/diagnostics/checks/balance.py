"""AM3xx: balance between experts."""

from __future__ import annotations

import math
import statistics

from actmat.diagnostics.checks.base import Check, Facts, Outcome, clear, found, not_applicable, percent

__all__ = ["BALANCE_CHECKS"]

DOMINANT = 3.0
"""Norm of one expert against the median of the others. Gram matrices weigh with its square: nine times as much."""

LOST = 0.1
"""Share of an expert's energy outside the kept directions."""


def _dominates(facts: Facts) -> Outcome:
    norms = [facts.total_norm(t) for t in range(len(facts.labels))]
    if sum(n > 0 for n in norms) < 2:
        return not_applicable("fewer than two experts have deltas")
    top = max(range(len(norms)), key=norms.__getitem__)
    others = statistics.median(n for t, n in enumerate(norms) if t != top and n > 0)
    if norms[top] > DOMINANT * others:
        return found(
            f"'{facts.labels[top]}' has {norms[top] / others:.3g} times the norm of the other experts (median) and "
            f"{percent(norms[top] ** 2, math.fsum(n * n for n in norms))} of all energy. Rules that weigh by Gram "
            "matrices follow it almost alone: normalise (wudi, or actmat with normalise=norm), or scale it down"
        )
    return clear(f"the largest expert has {norms[top] / others:.3g} times the norm of the others (median)")


def _cut_away(facts: Facts) -> Outcome:
    rows = [(m, m.energy_kept) for m in facts.measures if m.energy_kept is not None]
    if not rows:
        return not_applicable("the rule cuts no directions off")
    said, names, worst = [], [], 0.0
    for t, label in enumerate(facts.labels):
        whole = math.fsum(m.norms[t] ** 2 for m, _ in rows)
        lost = math.fsum(m.norms[t] ** 2 * (1 - kept[t]) for m, kept in rows)
        share = lost / whole if whole else 0.0
        worst = max(worst, share)
        if share > LOST:
            said.append(f"'{label}' {percent(share)}")
            names += [m.name for m, kept in rows if kept[t] < 1 - LOST]
    if said:
        return found(
            f"The cut-off drops directions that hold much of an expert's energy: {'; '.join(said)}. Usually it is far "
            "smaller than the others: normalise, lower rtol, or use actmat_ridge",
            names,
        )
    return clear(f"the cut-off drops at most {percent(worst)} of an expert's energy")


BALANCE_CHECKS = (
    Check("AM301", "One expert dominates", "issue", _dominates),
    Check("AM302", "Cut-off removes an expert's energy", "issue", _cut_away),
)
