"""Progress in notebooks: tqdm's bar, in kernels only."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.merging import Family

import actmat
from actmat.extras.tune.settings import NotebookTuneProgress, TuneProgress, usual_tune_progress
from actmat.progress import NoProgress, NotebookProgress, in_notebook, usual_progress


def in_shell(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_only_kernels_are_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)):
        in_shell(monkeypatch, shell)
        assert in_notebook() is expected
        assert isinstance(usual_progress(), NotebookProgress) is expected
        assert isinstance(usual_tune_progress(), NotebookTuneProgress) is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(usual_progress()) is NoProgress
    assert type(usual_tune_progress()) is TuneProgress


def test_a_merge_shows_a_bar_that_ends_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_shell(monkeypatch, SimpleNamespace(kernel=1))
    family = Family.make(tmp_path, layers=1)
    tensors = len(actmat.plan(family.base, family.experts).items)
    actmat.merge(family.base, family.experts, out=family.out, durable=False)
    shown = capsys.readouterr().err
    assert "merging:   0%" in shown
    assert f"merging: 100%|##########| {tensors}/{tensors}" in shown.replace("█", "#")
    actmat.diagnose(family.base, family.experts)
    assert "measuring: 100%" in capsys.readouterr().err
    actmat.merge(family.base, family.experts, out=tmp_path / "silent", durable=False, progress=NoProgress())
    assert capsys.readouterr().err == ""


def test_notes_are_shown_as_text_and_resumed_tensors_count(capsys: pytest.CaptureFixture[str]) -> None:
    progress, items = NotebookProgress(), [SimpleNamespace(action="merge")] * 50
    plan: Any = SimpleNamespace(items=[*items, SimpleNamespace(action="tie")])
    progress.started([plan], 10, 1)
    progress.note("a worker \x1b[2K was lost")
    for number in range(40):
        progress.tensor(f"t{number}", 1)
    shown = capsys.readouterr().err
    assert r"a worker \x1b[2K was lost" in shown
    assert "10/50" in shown
    assert "50/50" in shown


def test_a_search_shows_its_stage_and_its_best(capsys: pytest.CaptureFixture[str]) -> None:
    progress = NotebookTuneProgress()
    progress.doing("searching")
    best: Any = SimpleNamespace(candidate="ties x 0.5", mean=0.25)
    progress.trial(best, best)
    progress.note("candidates stay in files")
    del progress
    shown = capsys.readouterr().err
    assert "searching: 0 tried" in shown
    assert "searching: 1 tried, best ties x 0.5 (0.25)" in shown
    assert "candidates stay in files\n" in shown
