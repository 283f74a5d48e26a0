"""Tables of docs/semantics.md, from the result of `python -m benchmarks.semantics`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.common import read_result
from benchmarks.pages import table

OUTCOMES = ("exact", "file", "refused", "peft", "FAILURE")


def semantics_table(name: str) -> str:
    """The part of the page of that name."""
    return PARTS[name](read_result("semantics"))


def cells(result: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Version, family, option, outcome and reason of every cell."""
    return [
        (version, row["family"], row["option"], outcome, result["reasons"][int(number)] if number else "")
        for row in result["rows"]
        for version in _versions(result)
        for outcome, _, number in (row[version].partition(" "),)
    ]


def _versions(result: dict[str, Any]) -> list[str]:
    return [e["peft"] for e in result["environments"]]


def _summary(result: dict[str, Any]) -> str:
    counts = Counter((version, outcome) for version, _, _, outcome, _ in cells(result))
    rows = [
        [f"PEFT {e['peft']}", e["transformers"], e["torch"], *(str(counts[e["peft"], o]) for o in OUTCOMES)]
        for e in result["environments"]
    ]
    cases = (
        f"{len({r['family'] for r in result['rows']})} families, {len({r['option'] for r in result['rows']})} options, "
    )
    made = f"{cases}{len(cells(result))} cells; {result['processor']}, {result['date']}.\n\n"
    return made + table(
        ["version", "transformers", "torch", "exact", "as its file", "refused", "PEFT refuses", "failures"], rows
    )


def _by(column: int, title: str) -> Callable[[dict[str, Any]], str]:
    """A table of one column of the cells against the versions."""

    def made(result: dict[str, Any]) -> str:
        counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        for cell in cells(result):
            counts[cell[column]][cell[0], cell[3]] += 1
        versions = _versions(result)
        rows = [[name, *(_counted(found, v) for v in versions)] for name, found in counts.items()]
        return table([title, *versions], rows)

    return made


def _counted(found: Counter[tuple[str, str]], version: str) -> str:
    """Numbers of exact cells, of those that actmat refuses, of those that PEFT refuses; of others if there are any."""
    exact, file, refused, peft, failed = (found[version, outcome] for outcome in OUTCOMES)
    more = (f", {file} as its file" if file else "") + (f", {failed} FAILURES" if failed else "")
    return f"{exact} / {refused} / {peft}{more}"


def _reasons(outcome: str) -> Callable[[dict[str, Any]], str]:
    """A table of the reasons of one outcome: alike but for names and numbers is one reason."""

    def made(result: dict[str, Any]) -> str:
        found: dict[str, list[tuple[str, str, str, str, str]]] = defaultdict(list)
        for cell in cells(result):
            if cell[3] == outcome:
                found[_alike(cell[4])].append(cell)
        rows = []
        for group in sorted(found.values(), key=len, reverse=True):
            options = _few(dict.fromkeys(f"`{c[2]}`" for c in group))
            rows.append([group[0][4], options, _few(dict.fromkeys(c[0] for c in group), 9), str(len(group))])
        return table(["reason", "options", "versions", "cells"], rows)

    return made


def _few(names: dict[str, None], most: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def _alike(reason: str) -> str:
    return re.sub(r"'[^']*'|\d+", "_", reason)


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": _summary,
    "families": _by(1, "family"),
    "options": _by(2, "option"),
    "file": _reasons("file"),
    "refused": _reasons("refused"),
    "peft": _reasons("peft"),
}
