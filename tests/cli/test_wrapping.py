"""No part of a long foreign name stands at the start of a line, whatever its length, on a terminal or in a pipe."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.helpers.merging import Family, actmat
from tests.helpers.repository import ROOT

from actmat.cli.screen import SafeConsole, escape, plain_table
from actmat.cli.streams import wrapped

FORGED = "actmat:all-good"


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=120), st.integers(12, 90))
def test_every_line_fits_and_only_the_first_begins_at_the_left(text: str, width: int) -> None:
    first, *rest = wrapped(text, width).split("\n")
    assert cell_len(first) <= width
    assert all(line.startswith("    ") and cell_len(line) <= width for line in rest)
    words = "".join([first, *rest]).split()
    assert "".join(words) == "".join(text.split())


def test_lines_break_between_words_and_marks_stay_with_their_text() -> None:
    assert wrapped("one two three", 13) == "one two three"
    assert wrapped("one two three", 12) == "one two\n    three"
    assert wrapped("  - " + "x" * 20, 16) == "  - " + "x" * 12 + "\n    " + "x" * 8
    assert wrapped("a\n\nb", 5) == "a\n\nb"
    assert wrapped(" " * 30 + "word", 20).split("\n")[1].startswith("    ")


def shown(renderable: object) -> list[str]:
    """Lines that a console of 40 columns prints."""
    out = io.StringIO()
    SafeConsole(file=out, width=40, highlight=False, emoji=False).print(renderable)
    return out.getvalue().split("\n")


@pytest.mark.parametrize("before", range(25, 45))
def test_lines_and_first_columns_are_continued_with_an_indentation(before: int) -> None:
    name = "x" * before + FORGED + " " * before + FORGED
    assert not [line for line in shown(f"note: {escape(name)}") if line.startswith("actmat")]
    table = plain_table("matrix", "rho")
    table.add_row(escape(name), "0.5")
    table.add_row("short", "1")
    lines = shown(table)
    assert not [line for line in lines[1:] if line.startswith("actmat")]
    assert lines[-2].split() == ["short", "1"]
    assert len(lines) > 4


@pytest.mark.parametrize("length", [60, 71, 75, 150])
def test_commands_on_long_names(tmp_path: Path, length: int) -> None:
    family = Family.make(tmp_path / "f", layers=1)
    name = "y" * length + FORGED + " " * 40 + FORGED + ".weight"
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t.update({name: t["lm_head.weight"] + 1.0}))
    for argv in (["inspect", str(family.base), "--all"], family.argv("--all", command="plan")):
        outcome = actmat([a for a in argv if a not in ("--quiet", "--out", str(family.out))])
        assert FORGED in outcome.out.replace("\n", "").replace(" ", "")
        assert not [line for line in outcome.out.split("\n") if line.startswith("actmat:")], outcome.out


def test_errors_on_a_terminal(tmp_path: Path) -> None:
    """The terminal itself would break a line of 80 columns wherever the name wants it."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "60", "TERM": "xterm"}
    ours, theirs = pty.openpty()
    command = "from actmat.cli.main import main; main()"
    place = "./" + "z" * 51 + FORGED  # with its prefix, 60 columns before the forged line
    process = subprocess.Popen([sys.executable, "-c", command, "inspect", place], stderr=theirs, env=env)
    process.wait()
    os.close(theirs)
    said = os.read(ours, 10000).decode().replace("\r", "")
    os.close(ours)
    assert process.returncode == 1
    lines = [line.replace("\x1b[31m", "") for line in said.split("\n")]
    assert max(map(cell_len, lines)) <= 60
    assert FORGED in "".join(line.strip() for line in lines)
    assert not [line for line in lines[1:] if line.startswith("actmat")]
