"""Pages of reports: text, files, exit codes."""

from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat
from tests.helpers.pages import Page
from tests.helpers.reports import diagnosis

from actmat.diagnostics.model import read_diagnosis, write_diagnosis
from actmat.extras.pages.html import render_html


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    made = Family.make(tmp_path_factory.mktemp("merges"))
    inputs = made.argv(command="plan")[1:]
    actmat(["merge", *inputs, "-m", "actmat", "--diagnose", "--out", made.root / "actmat", "--quiet"], code=0)
    return made


def test_the_page_of_a_merge_is_drawn_again(family: Family, tmp_path: Path) -> None:
    out, page = family.root / "actmat", tmp_path / "pages" / "mine.html"
    actmat(["diagnose", out, "--out", page], code=0)
    text = page.read_text(encoding="utf-8")
    assert text == render_html(read_diagnosis(out))
    assert Page(text).problems == []


@pytest.mark.parametrize("name", ["report.json", "other.json"])
def test_a_report_is_shown_and_drawn(tmp_path: Path, name: str) -> None:
    write_diagnosis(diagnosis(2, 2), tmp_path / name)
    done = actmat(["diagnose", tmp_path / name, "--out", tmp_path / "mine.html"], code=0)
    assert "2 experts" in done.out
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == render_html(diagnosis(2, 2))
    refused = actmat(["diagnose", tmp_path / name, "--base", "org/base"])
    assert (refused.code, "is a report" in refused.words) == (2, True)


def test_page_report_and_the_command_that_explains_a_warning_are_named(family: Family, tmp_path: Path) -> None:
    far = tmp_path / "far away"
    inputs = family.argv(command="plan")[1:]
    merge = ["merge", *inputs, "-m", "ties", "--scale", "20", "--out", str(far)]
    lines = actmat(merge).out.splitlines()
    warned = next(n for n, line in enumerate(lines) if "warning AM403: the merged delta exploded" in line)
    assert f"    actmat diagnose '{far}'" in lines[warned + 1 : warned + 5], "in one line, to be copied"
    again = actmat(merge).words
    assert "already complete from an earlier run" in again
    assert "is it good? Not measured: add --data NAME=INPUTS per expert" in again
    assert "warning AM403" in again
    told = actmat([*merge, "--overwrite", "--diagnose"]).out
    assert told.splitlines()[-1] == f"report: {far}/report.html"
