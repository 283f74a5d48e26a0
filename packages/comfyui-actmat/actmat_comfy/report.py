"""Format a diagnosis as fixed-width text, for a text box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from actmat.diagnostics.model import Diagnosis, MatrixRow

CONTESTED = 10
"""Maximum number of listed modules."""


def conflict_text(found: Diagnosis) -> str:
    """Format experts, pairs of experts, findings, and the modules on which the experts disagree most."""
    names = [e.name for e in found.experts]
    blocks = [
        f"{found.method} over {len(names)} LoRA files: {len(found.measures)} modules measured",
        "rho: 0 as this LoRA on its own inputs, 1 as without it\n" + _experts(found, names),
    ]
    if len(names) > 1:
        blocks.append("overlap: share of common input directions; medians\n" + _pairs(found.measures, names))
    findings = [f"{c.severity} {c.code} {c.title}: {c.message}." for c in found.checks if c.verdict == "found"]
    blocks.append("\n".join(findings) or "checks: nothing found")
    if found.measures:
        blocks.append("most contested modules\n" + _contested(found.measures, names))
    return "\n\n".join(blocks)


def _experts(found: Diagnosis, names: Sequence[str]) -> str:
    rows = [("LoRA", "norm", "modules", "rank", "rho")]
    for t, summary in enumerate(found.experts):
        own = [m for m in found.measures if m.norms[t] > 0]
        norm = math.sqrt(math.fsum(m.norms[t] ** 2 for m in own))
        rank = _median(m.numerical_rank[t] for m in own)
        rows.append((names[t], f"{norm:.3g}", str(len(own)), rank, f"{summary.residual:.2f}"))
    return _table(rows)


def _pairs(measures: Sequence[MatrixRow], names: Sequence[str]) -> str:
    rows = [("pair", "cosine", "overlap", "by chance")]
    for t, one in enumerate(names):
        for s in range(t):
            both = [m for m in measures if m.norms[t] > 0 and m.norms[s] > 0]
            cosine = _median(m.cosine[t][s] for m in both)
            overlap = _median(m.subspace_overlap[t][s] for m in both)
            chance = _median(m.chance_overlap for m in both)
            rows.append((f"{names[s]} + {one}", cosine, overlap, chance))
    return _table(rows)


def _contested(measures: Sequence[MatrixRow], names: Sequence[str]) -> str:
    rows = [("module", "rho", "LoRA")]
    for m in sorted(measures, key=lambda m: (-m.contested, m.label))[:CONTESTED]:
        worst = max(range(len(m.residual)), key=m.residual.__getitem__)
        rows.append((m.label, f"{m.residual[worst]:.2f}", names[worst]))
    return _table(rows)


def _median(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.3g}" if ordered else "-"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
