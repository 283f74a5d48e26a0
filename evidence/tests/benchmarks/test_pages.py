"""Parts of pages that follow from result files are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import table
from benchmarks.pages import PART, filled, pages
from benchmarks.provenance import REPOSITORY


def test_pages_and_files_are_what_the_results_say() -> None:
    stale = [str(path.relative_to(REPOSITORY)) for path in table.stale_files()]
    assert stale == [], "run python -m benchmarks.table"


def test_every_kind_is_used() -> None:
    assert {part["kind"] for page in pages().values() for part in PART.finditer(page)} == table.KINDS.keys()


def test_a_stale_part_is_replaced_and_the_rest_kept() -> None:
    page = "above\n<!-- evidence: loud a -->\nSTALE\n<!-- end evidence -->\nbelow\n"
    assert filled(page, {"loud": str.upper}) == "above\n<!-- evidence: loud a -->\n\nA\n<!-- end evidence -->\nbelow\n"
    with pytest.raises(KeyError, match="loud"):
        filled(page, {})


# Numbers in sentences


NAMES = ("evidence", "tried", "families", "performance", "tune-results", "choosing")
RESULTS = [
    *(REPOSITORY / "docs" / f"{name}.md" for name in NAMES),
    *sorted(p for folder in ("experiments", "analyses") for p in (REPOSITORY / "docs" / folder).glob("*.md")),
]
NO_PROSE = re.compile(
    r"<!-- (?:generated|evidence).*?<!-- end \w+ -->|<!--.*?-->|^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)|^ *\|[^\n]*$"
    r"|^    [^\n]*\(\d'?\)$",
    re.DOTALL | re.MULTILINE,
)
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")
CONSTANTS = re.compile(
    r"\b(?:Theorem|Theorems|Lemma|Section|Table|number|theorem is) \d\.\d+(?:'s)?"  # of the paper
    r"|Apache-2\.0"
    r"|\b\d+\.\d+ (?:B|M|GiB|hours)\b(?: parameters)?"  # sizes of models, and what a large one costs
    r"|\b3\.3, the lemmas"
)


@pytest.mark.parametrize("page", RESULTS, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_sentences_of_results_leave_measured_numbers_to_the_tables(page: Path) -> None:
    text = CONSTANTS.sub("", NO_PROSE.sub("", page.read_text(encoding="utf-8")))
    assert DECIMAL.findall(text) == [], "leave them to a table from a result file; constants stand in backticks"
