"""The table of all tensors: the first rows as HTML, and data from which the script draws the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.diagnostics.model import Diagnosis, Measure
from actmat.extras.pages.html.environment import shape_text
from actmat.extras.pages.html.scales import number

PAGE_ROWS = 50
"""Rows on one page of the table, and rows that are shown without a script."""

DETAILED = 2000
"""Matrices whose measures are in the page: those of the largest residual. All are in report.json."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        title: its heading.
        kind: "name" and "text" hold texts, "choice" few different ones (it gets a filter), "number" numbers or None.
        values: one per row.
    """

    title: str
    kind: str
    values: Sequence[Any]

    def text(self, row: int) -> str:
        """A cell as the page shows it; the script, too, writes numbers with three digits."""
        return number(self.values[row]) if self.kind == "number" else str(self.values[row])

    def to_json(self) -> dict[str, Any]:
        """Plain data: texts are stored once each, numbers with four digits."""
        head = {"title": self.title, "kind": self.kind}
        if self.kind == "number":
            return head | {"values": [_rounded(v) for v in self.values]}
        found = _words(self.values)
        if self.kind == "name" or len(found["words"]) == len(self.values):
            return head | {"values": list(self.values)}
        return head | found


def _words(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Different texts once each, and their index per row."""
    index = {w: i for i, w in enumerate(dict.fromkeys(texts))}
    return {"words": list(index), "values": [index[t] for t in texts]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


@dataclass(frozen=True, slots=True)
class BigTable:
    """A table with its controls; `details` are drawn below a row when it is opened."""

    columns: Sequence[Column]
    details: Any = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.columns[0].values)

    @property
    def shown(self) -> range:
        """Rows that are there without a script."""
        return range(min(self.count, PAGE_ROWS))

    @property
    def data(self) -> dict[str, Any]:
        """The data of the script."""
        return {"columns": [c.to_json() for c in self.columns], "page": PAGE_ROWS, "details": self.details}


def tensors(diagnosis: Diagnosis) -> tuple[BigTable, int]:
    """Action, reason, options and measures of each tensor; and how many matrices' measures are left out."""
    measures: dict[str, list[Measure]] = {}
    for m in diagnosis.measures:
        measures.setdefault(m.name, []).append(m)
    rows = diagnosis.tensors
    columns = [
        Column("tensor", "name", [t.name for t in rows]),
        Column("action", "choice", [t.action + (", unchanged" if t.unchanged else "") for t in rows]),
        Column("role", "choice", [t.role for t in rows]),
        Column("shape", "text", [shape_text(t.shape) for t in rows]),
        Column("dtype", "choice", [t.dtype for t in rows]),
        Column("rule", "choice", [t.method or "–" for t in rows]),
        Column("reason", "text", [t.reason for t in rows]),
        Column(
            "largest ρ", "number", [max((m.contested for m in measures.get(t.name, ())), default=None) for t in rows]
        ),
        Column("seconds", "number", [t.seconds for t in rows]),
    ]
    largest = sorted(diagnosis.measures, key=lambda m: -m.contested)[:DETAILED]
    kept = {id(m) for m in largest}
    details = _details(diagnosis, (m for m in diagnosis.measures if id(m) in kept))
    return BigTable(columns, details), len(diagnosis.measures) - len(largest)


_HEAD = ("expert", "‖D‖", "‖D‖ / ‖W₀‖", "over rounding", "effective rank", "energy kept", "ρ")
_FACTS = {
    "merged": "merged_norm",
    "mean": "mean_norm",
    "sum": "sum_norm",
    "effective rank of S": "sum_effective_rank",
    "numerical rank of S": "sum_numerical_rank",
    "rank kept": "rank_kept",
    "cut-off": "cutoff",
}
"""Facts of a measured matrix, and the fields of `Measure` that have them."""


def _details(diagnosis: Diagnosis, kept: Iterable[Measure]) -> dict[str, Any]:
    """Per row: lines of text, and one table per measured matrix, experts down."""
    rows = {t.name: i for i, t in enumerate(diagnosis.tensors)}
    matrices: dict[int, list[Any]] = {}
    edges = diagnosis.measures[0].spectrum.edges if diagnosis.measures else ()
    for m in kept:
        columns = (m.norms, m.relative_norms, m.snr, m.effective_rank, m.energy_kept, m.residual)
        facts = {title: _rounded(getattr(m, field)) for title, field in _FACTS.items()}
        matrices.setdefault(rows.get(m.name, -1), []).append(
            {
                "part": m.part,
                "values": [None if c is None else [_rounded(v) for v in c] for c in columns],
                "facts": {k: v for k, v in facts.items() if v is not None},
                "counts": list(m.spectrum.counts) if m.spectrum.edges == edges else None,
            }
        )
    texts = [json.dumps(dict(t.options), ensure_ascii=False) if t.options else "" for t in diagnosis.tensors]
    return {
        "head": _HEAD,
        "experts": [e.name for e in diagnosis.experts],
        "edges": list(edges),
        "matrices": matrices,
        "options": _words(texts),
    }
