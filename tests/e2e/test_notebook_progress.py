"""Progress in notebooks: one line, replaced in place, in kernels only."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.merging import Family

import actmat
from actmat.extras.notebook import progress as notebook
from actmat.extras.notebook.progress import NotebookLine, NotebookProgress
from actmat.extras.tune.settings import NotebookTuneProgress, TuneProgress, usual_tune_progress
from actmat.progress import NoProgress, in_notebook, usual_progress


class Display:
    """A front end: texts of every line, in order."""

    def __init__(self) -> None:
        self.lines: list[list[dict[str, str]]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        line = [data]
        self.lines.append(line)
        return SimpleNamespace(update=lambda data, raw: line.append(data))


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Display:
    found = Display()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=found.display))
    monkeypatch.setattr(notebook, "SECONDS", 0.0)
    return found


def test_only_kernels_are_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda found=shell: found))
        assert in_notebook() is expected
        assert isinstance(usual_progress(), NotebookProgress) is expected
        assert isinstance(usual_tune_progress(), NotebookTuneProgress) is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(usual_progress()) is NoProgress
    assert type(usual_tune_progress()) is TuneProgress


def test_a_merge_shows_one_line_that_ends_full(front: Display, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    actmat.merge(family.base, family.experts, out=family.out, durable=False)
    (line,) = front.lines
    tensors = len(actmat.plan(family.base, family.experts).items)
    assert line[0]["text/plain"] == f"merging: 0 of {tensors} tensors, 0 s"
    assert line[-1]["text/plain"].startswith(f"merging: {tensors} of {tensors} tensors")
    assert '<progress value="1.0000" max="1">' in line[-1]["text/html"]
    assert len(line) == tensors + 1
    actmat.diagnose(family.base, family.experts)
    assert front.lines[1][-1]["text/plain"].startswith("measuring: ")
    actmat.merge(family.base, family.experts, out=tmp_path / "silent", durable=False, progress=NoProgress())
    assert len(front.lines) == 2


def test_updates_are_rare_and_the_last_one_is_shown(front: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "SECONDS", 1000.0)
    progress, items = NotebookProgress(), [SimpleNamespace(action="merge")] * 50
    plan: Any = SimpleNamespace(items=[*items, SimpleNamespace(action="tie")])
    progress.started([plan], 10, 1)
    for number in range(40):
        progress.tensor(f"t{number}", 1)
    assert [row["text/plain"].partition(",")[0] for row in front.lines[0]] == [
        "merging: 10 of 50 tensors",
        "merging: 50 of 50 tensors",
    ]
    progress.note("a worker was lost")
    assert front.lines[1][0]["text/plain"] == "a worker was lost"


def test_foreign_text_is_shown_as_text(front: Display) -> None:
    NotebookLine().show("<script>\x1b[2K", now=True)
    (row,) = front.lines[0]
    assert "<script>" not in row["text/html"]
    assert row["text/plain"] == r"<script>\x1b[2K"
    assert "<progress" not in row["text/html"]


def test_a_search_shows_its_stage_and_its_best(front: Display) -> None:
    progress = NotebookTuneProgress()
    progress.doing("searching")
    best: Any = SimpleNamespace(candidate="ties x 0.5", mean=0.25)
    progress.trial(best, best)
    progress.note("candidates stay in files")
    assert [[row["text/plain"] for row in line] for line in front.lines] == [
        ["searching", "searching: 1 tried, best ties x 0.5 (0.25)"],
        ["candidates stay in files"],
    ]
