"""Numbers in the sentences of the pages of results come from result files, or are constants in backticks.

A measured number gets a mark of `docs/quoted.py`, or leaves the sentence for a table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.quoted import MARK, NUMBERS
from tests.helpers.repository import ROOT

NAMES = ("evidence", "data-free", "forecast", "families", "performance")
PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in NAMES),
    *sorted(p for folder in ("experiments", "analyses") for p in (ROOT / "docs" / folder).glob("*.md")),
]
NO_PROSE = (
    re.compile(r"<!-- generated.*?<!-- end generated -->|<!-- table: .*?<!-- end table -->", re.DOTALL),
    re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE),
    re.compile(r"^ *\|.*$|^    .*\(\d'?\)$", re.MULTILINE),
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
)
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")
CONSTANTS = re.compile(
    r"\b(?:Theorem|Theorems|Lemma|Section|Table|number|theorem is) \d\.\d+(?:'s)?"  # of the paper
    r"|Apache-2\.0"
    r"|\b\d+\.\d+ (?:B|M)\b(?: parameters)?"  # sizes of models
    r"|\b3\.3, the lemmas"
)


def unmarked(page: str) -> list[str]:
    """Decimal numbers of the sentences that neither a mark nor a constant explains, with words around them."""
    text = MARK.sub("", page)
    for pattern in NO_PROSE:
        text = pattern.sub("", text)
    text = re.sub(r"\s+", " ", CONSTANTS.sub("", text))
    return [text[max(0, m.start() - 40) : m.end() + 20] for m in DECIMAL.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_measured_numbers_of_sentences_are_marked(page: Path) -> None:
    found = unmarked(page.read_text(encoding="utf-8"))
    assert not found, "give them a mark (docs/quoted.py), or leave them to a table; constants stand in backticks"


def test_pages_are_those_of_results() -> None:
    assert len(PAGES) > 20
    marked = [m["name"] for page in PAGES for m in MARK.finditer(page.read_text(encoding="utf-8"))]
    assert len(set(marked)) > 15
    assert set(marked) <= set(NUMBERS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 2.5 points above.", 1),
        ("It is <!-- n: a -->2.5<!-- /n --> points above.", 0),
        ("scales of `0.5`, and\n| 2.5 | 3.5 |\n\n```text\n1.5\n```\n", 0),
        ("Theorem 3.1 of a model of 1.1 B, Apache-2.0", 0),
        ("<!-- generated: evidence gram -->\n1.5\n<!-- end generated --> and 4.5 %", 1),
        ("version 0.19.1 of a library", 0),
    ],
)
def test_what_counts(text: str, found: int) -> None:
    assert len(unmarked(text)) == found
