"""Tables of docs/families.md, from the result of `python -m benchmarks.families`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import read_result
from benchmarks.pages import table

STAGES = {
    "ran": "merged, loaded without a missing or unexpected key, run: finite outputs",
    "loaded": "merged and loaded without a missing or unexpected key; no guess of its inputs ran",
    "merged": "merged, but the result was not loaded as it should be",
    "failed": "the merge was refused",
    "built": "built, but its own library does not load what it saves",
    "none": "not built tiny by rule",
}
Rows = Sequence[Mapping[str, Any]]


def family_table(name: str) -> str:
    """The part of the page of that name."""
    return PARTS[name](read_result("families")["rows"])


def _summary(rows: Rows) -> str:
    counts = Counter((r["library"], r["stage"]) for r in rows)
    lines = [
        [what, *(str(counts[library, stage]) for library in ("transformers", "diffusers"))]
        for stage, what in STAGES.items()
    ]
    return table(["classes", "transformers", "diffusers"], lines)


def _packed(rows: Rows) -> str:
    ran = [r for r in rows if r["stage"] == "ran"]
    agree, unseen = (sum(r.get(key, 0) for r in ran) for key in ("agree", "unseen"))
    wrong = sum(len(r.get("wrong", ())) for r in ran)
    lines = [
        ["packed tensors whose maps are the pieces into which the code splits them", str(agree)],
        ["packed tensors that the code was not seen to split (kernels, loops, paths that did not run)", str(unseen)],
        ["packed tensors whose maps are others than the code's", str(wrong)],
        ["classes with a tensor that the code splits and actmat keeps whole, listed below", str(len(_missed(ran)))],
    ]
    return table(["what was found in the classes that ran", "number"], lines)


def _missed(rows: Rows) -> Rows:
    return [r for r in rows if r.get("missed")]


def _whole(rows: Rows) -> str:
    parts = [(row["class"], *row["missed"][0].partition(": ")) for row in _missed(rows)]
    lines = [[f"`{kind}`", f"`{name}`", pieces] for kind, name, _, pieces in parts]
    return table(["class", "first tensor", "pieces in the code"], lines)


def _classes(rows: Rows) -> str:
    lines = []
    for row in rows:
        if row["stage"] in ("ran", "loaded", "merged", "failed", "built"):
            actions = ", ".join(f"{n} {action}" for action, n in row.get("actions", {}).items())
            packed = f"{row.get('agree', 0)} of {row['packed']}" if row.get("packed") and row["stage"] == "ran" else ""
            lines.append([f"`{row['class']}`", row["stage"], str(row.get("tensors", "")), actions, packed])
    return table(["class", "reached", "tensors", "actions", "packed, seen"], lines)


def _refused(rows: Rows) -> str:
    some = [row for row in rows if row["stage"] in ("merged", "failed", "built")]
    return table(["class", "why"], [[f"`{r['class']}`", str(r.get("why", "")).splitlines()[0][:160]] for r in some])


def _unbuilt(rows: Rows) -> str:
    names = [f"`{r['class']}`" for r in rows if r["stage"] == "none"]
    return f"{', '.join(names)}.\n"


PARTS: dict[str, Callable[[Rows], str]] = {
    "summary": _summary,
    "packed": _packed,
    "whole": _whole,
    "classes": _classes,
    "refused": _refused,
    "unbuilt": _unbuilt,
}
