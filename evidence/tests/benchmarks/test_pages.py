"""Parts of pages that follow from result files are up to date."""

from __future__ import annotations

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


@pytest.mark.parametrize("check", [True, False])
def test_the_command_writes_what_is_old(
    check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("old")
    monkeypatch.setattr(table, "REPOSITORY", tmp_path)
    monkeypatch.setattr(table, "stale_files", lambda: {page: "new"})
    monkeypatch.setattr("sys.argv", ["table", *["--check"] * check])
    with pytest.raises(SystemExit) as end:
        table.main()
    assert (end.value.code, page.read_text()) == (check, "old" if check else "new")
    assert "page.md" in capsys.readouterr().out
