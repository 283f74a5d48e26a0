"""The table of all tensors: the first rows as HTML, and data from which the script draws the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.diagnostics.model import Diagnosis, Measure
from actmat.extras.pages.html.elements import (
    Markup,
    data_block,
    dotted,
    el,
    join,
    long_part,
    section,
    shape_text,
    table,
)
from actmat.extras.pages.html.scales import number
from actmat.report.words import plural

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


def big_table(columns: Sequence[Column], *, caption: str, details: Any = None) -> Markup:
    """The table with its controls; `details` are drawn below a row when it is opened."""
    count = len(columns[0].values)
    head = el("tr", *(el("th", c.title, scope="col", class_=c.kind) for c in columns))
    rows = []
    for i in range(min(count, PAGE_ROWS)):
        name = el("th", el("code", *dotted(columns[0].text(i))), scope="row", class_=columns[0].kind)
        rows.append(el("tr", name, *(el("td", c.text(i), class_=c.kind, data_label=c.title) for c in columns[1:])))
    more = f"The first {PAGE_ROWS} of {count:,}; the others need JavaScript." if count > PAGE_ROWS else None
    return join(
        [
            long_part(
                f"The table of {plural(count, 'tensor')}",
                el("div", class_="controls", hidden=True),
                table(head, rows, caption=caption, class_="big stack"),
                el("noscript", el("p", more)) if more else None,
            ),
            data_block("rows", {"columns": [c.to_json() for c in columns], "page": PAGE_ROWS, "details": details}),
        ]
    )


def tensors(diagnosis: Diagnosis) -> Markup:
    """Section "Every tensor": action, reason, options and measures of each."""
    measures: dict[str, list[Measure]] = {}
    for m in diagnosis.measures:
        measures.setdefault(m.name, []).append(m)
    rows = diagnosis.tensors
    worst = [max((m.contested for m in measures.get(t.name, ())), default=None) for t in rows]
    columns = [
        Column("tensor", "name", [t.name for t in rows]),
        Column("action", "choice", [t.action + (", unchanged" if t.unchanged else "") for t in rows]),
        Column("role", "choice", [t.role for t in rows]),
        Column("shape", "text", [shape_text(t.shape) for t in rows]),
        Column("dtype", "choice", [t.dtype for t in rows]),
        Column("rule", "choice", [t.method or "–" for t in rows]),
        Column("reason", "text", [t.reason for t in rows]),
        Column("largest ρ", "number", worst),
        Column("seconds", "number", [t.seconds for t in rows]),
    ]
    kept, left = _detailed(diagnosis.measures)
    note = (
        f" The page holds the measures of the {DETAILED:,} matrices of largest ρ; {left:,} more are in report.json."
        if left
        else ""
    )
    return section(
        "tensors",
        "Every tensor",
        big_table(columns, caption="Every tensor, what was done to it and why", details=_details(diagnosis, kept)),
        lead=f"{plural(len(rows), 'tensor')} in the order of the output. Open one for its options and measures.{note}",
    )


def _detailed(measures: Sequence[Measure]) -> tuple[list[Measure], int]:
    if len(measures) <= DETAILED:
        return list(measures), 0
    limit = sorted((m.contested for m in measures), reverse=True)[DETAILED - 1]
    kept = [m for m in measures if m.contested >= limit][:DETAILED]
    return kept, len(measures) - len(kept)


_HEAD = ("expert", "‖D‖", "‖D‖ / ‖W₀‖", "over rounding", "effective rank", "energy kept", "ρ")


def _details(diagnosis: Diagnosis, kept: Iterable[Measure]) -> dict[str, Any]:
    """Per row: lines of text, and one table per measured matrix, experts down."""
    rows = {t.name: i for i, t in enumerate(diagnosis.tensors)}
    matrices: dict[int, list[Any]] = {}
    edges = diagnosis.measures[0].spectrum.edges if diagnosis.measures else ()
    for m in kept:
        columns = (m.norms, m.relative_norms, m.snr, m.effective_rank, m.energy_kept, m.residual)
        facts = {
            "merged": m.merged_norm,
            "mean": m.mean_norm,
            "sum": m.sum_norm,
            "effective rank of S": m.sum_effective_rank,
            "numerical rank of S": m.sum_numerical_rank,
            "rank kept": m.rank_kept,
            "cut-off": m.cutoff,
        }
        matrices.setdefault(rows.get(m.name, -1), []).append(
            {
                "part": m.part,
                "values": [None if c is None else [_rounded(v) for v in c] for c in columns],
                "facts": {k: _rounded(v) for k, v in facts.items() if v is not None},
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
