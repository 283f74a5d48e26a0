"""The table of the page on mergekit, from `results/mergekit.json`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from benchmarks.common import read_result
from benchmarks.pages import table

OUTCOMES = ("same bits", "same within rounding", "fails in both", "differs", "refused here", "fails in mergekit")
GOOD = OUTCOMES[:3]
"""Outcomes in which a configuration does here what it does in mergekit."""

_FILE = re.compile(r"^.*?\.yml:\d+: (parameters: )?")


def mergekit_table(_: str = "") -> str:
    """Numbers of configurations by outcome, and every one that does not do the same, with the reason."""
    result = read_result("mergekit")
    merges = result["rows"]
    counts = Counter(row["outcome"] for row in merges)
    rows = [[outcome, str(counts[outcome])] for outcome in OUTCOMES if counts[outcome]]
    rows.append(["all", str(len(merges))])
    others = [row for row in merges if row["outcome"] not in GOOD]
    listed = [f"* `{r['name']}`: {r['outcome']}, {_reason(r)}." for r in others]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions_of_mergekit"].items())
    return (
        table(["outcome", "merges"], rows)
        + f"\nIn {versions}; file `evidence/results/mergekit.json`.\n"
        + ("\n" + "\n".join(listed) + "\n" if listed else "")
    )


def _reason(row: dict[str, Any]) -> str:
    """The last problem of an error, without the place in the file."""
    return _FILE.sub("", (row.get("there") or row["reason"]).rstrip("."))
