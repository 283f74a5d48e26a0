"""Generated parts of the documentation are up to date, and no method is without a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import table as results
from docs import generate, markdown
from docs.markdown import PLACE, filled, pages
from docs.record import recorded
from tests.helpers.docs_run import Run
from tests.helpers.repository import ROOT

from actmat.methods import all_methods

PAGES = [p for p in pages() if p.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, generate.KINDS) == text, "run python -m docs.generate"
    assert filled(text, results.KINDS) == text, "run python -m benchmarks.table"


@pytest.mark.parametrize("made", [generate.WRITTEN, results.FILES], ids=["docs.generate", "benchmarks.table"])
def test_generated_files_are_up_to_date(made: dict) -> None:
    assert [f.name for f, text in made.items() if f.read_text(encoding="utf-8") != text()] == []


def test_every_kind_is_used_and_every_part_has_its_kind() -> None:
    used = {m["kind"] for p in PAGES for m in PLACE.finditer(p.read_text(encoding="utf-8"))}
    assert not generate.KINDS.keys() & results.KINDS.keys()
    assert used == generate.KINDS.keys() | results.KINDS.keys()


LONGEST_PAGE, LONGEST_OVERVIEW = 400, 600
"""Words of prose of the page of a method or a step, and of the overviews: without tables, formulas and code."""


def prose_words(page: str) -> int:
    """Words of a page outside generated parts, code, tables and formulas."""
    text = re.sub(r"<!-- generated.*?<!-- end generated -->|^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"^(?:    |\|).*$", "", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("folder", ["methods", "post"])
def test_pages_of_methods_are_short(folder: str) -> None:
    long = {}
    for page in (ROOT / "docs" / folder).glob("*.md"):
        found = prose_words(page.read_text())
        if found > (LONGEST_OVERVIEW if page.stem == "README" else LONGEST_PAGE):
            long[page.name] = found
    assert not long


def test_no_page_is_left_of_a_method_that_is_gone() -> None:
    listed = {p.stem for p in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    assert listed == {m.name for m in all_methods()}


def test_shown_console_output_fits_80_columns() -> None:
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for block in re.findall(r"^```(?:console|text)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if len(line) > 80
    ]
    assert wide == []


# Numbers in sentences

NAMES = ("evidence", "tried", "families", "performance", "tune", "tune-results", "choosing")
RESULTS = [
    *(ROOT / "docs" / f"{name}.md" for name in NAMES),
    *sorted(p for folder in ("experiments", "analyses") for p in (ROOT / "docs" / folder).glob("*.md")),
]
NO_PROSE = re.compile(
    r"<!-- generated.*?<!-- end generated -->|<!--.*?-->|^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)|^ *\|[^\n]*$"
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


@pytest.mark.parametrize("page", RESULTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_of_results_leave_measured_numbers_to_the_tables(page: Path) -> None:
    text = CONSTANTS.sub("", NO_PROSE.sub("", page.read_text(encoding="utf-8")))
    assert DECIMAL.findall(text) == [], "leave them to a table from a result file; constants stand in backticks"


# The generator itself


def test_a_stale_part_is_replaced_and_the_rest_kept() -> None:
    before = "above\n<!-- generated: method ties -->\nSTALE\n<!-- end generated -->\nbelow\n"
    after = filled(before, generate.KINDS)
    assert after.startswith("above\n<!-- generated: method ties -->\n")
    assert after.endswith("<!-- end generated -->\nbelow\n")
    assert "STALE" not in after
    assert filled(after, generate.KINDS) == after
    assert filled(before, results.KINDS) == before, "of another generator"


@pytest.mark.parametrize("check", [True, False])
def test_the_command_writes_what_is_old(
    check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: a b -->\n<!-- end generated -->\n")
    monkeypatch.setattr(markdown, "ROOT", tmp_path)
    monkeypatch.setattr(markdown, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["generate", "--check"] if check else ["generate"])
    with pytest.raises(SystemExit) as end:
        markdown.main("", {"a": str.upper}, {tmp_path / "file": lambda: "x"})
    assert end.value.code == check
    assert page.read_text().count("\nB\n") == (not check)
    assert (tmp_path / "file").exists() == (not check)
    assert "page.md" in capsys.readouterr().out


def test_recorded_output_replaces_what_disagrees() -> None:
    page = "a\n```console\n$ one\nold\n$ two\n$ three\n...\nend\n```\nb\n"
    run = Run(0, "", {3: ["new", "er"], 5: ["unasked"], 6: ["x", "end"]})
    assert recorded(page, run) == "a\n```console\n$ one\nnew\ner\n$ two\n$ three\n...\nend\n```\nb\n"
    assert recorded(page, Run(0, "", {3: ["old"], 5: [], 6: ["y"]})).splitlines()[5:7] == ["$ three", "y"]
