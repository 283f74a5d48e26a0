"""Plans, reports, diagnoses, checkpoints and methods in a notebook: one line, a table of a plan, and tqdm's bar."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.docs_fixture import write_adapter
from tests.helpers.merging import Family
from tests.helpers.merging import actmat as command_line
from tests.helpers.pages import Page

import actmat
from actmat.progress import NotebookProgress, Progress, in_notebook, usual_progress


def check(shown: Any, *words: str) -> None:
    text = repr(shown)
    assert len(text) < 300
    assert "\n" not in text
    assert all(w in text for w in words), text


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=12)


def test_a_plan_and_a_report_are_short(family: Family) -> None:
    plan = actmat.plan(family.base, family.experts, method="ties")
    check(plan, "<MergePlan: ties over 2 experts of", "merge", "average", "read")
    table = Page(plan._repr_html_())
    assert table.problems == []
    assert len(table.all("tr")) <= 40
    report = actmat.merge(family.base, family.experts, method="ties", out=family.out, diagnose=True)
    check(report, f"<MergeReport {family.out}:", "items by ties")
    check(report.diagnosis, "<Diagnosis", "ties over 2 experts", "matrices")
    again = actmat.merge(family.base, family.experts, method="ties", out=family.out, diagnose=True)
    check(again, "was finished before")


def test_gradients_reach_the_modules_of_adapters(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, seed=seed)
    file = tmp_path / "recipe.yaml"
    file.write_text("experts: [{path: one, weight: [0, 1]}, two]\nmethod: task_arithmetic\n")
    from actmat.api.reading import read_recipe
    from actmat.run import plan_recipe

    plan = plan_recipe(read_recipe(file))
    calls = {m.name: m.call for m in plan.modules}
    weights = {n: c.weights for n, c in calls.items() if c is not None and "q_proj" in n}
    assert sorted(weights.values()) == [(0.0, 1.0), (1.0, 1.0)]
    command_line(["merge", file, "--out", tmp_path / "out", "--quiet"], code=0)


# Progress in notebooks: tqdm's bar, in kernels only.


def in_shell(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_only_kernels_are_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)):
        in_shell(monkeypatch, shell)
        assert in_notebook() is expected
        assert isinstance(usual_progress(), NotebookProgress) is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(usual_progress()) is Progress


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
    actmat.merge(family.base, family.experts, out=tmp_path / "silent", durable=False, progress=Progress())
    assert capsys.readouterr().err == ""


def test_a_search_shows_its_stage_and_its_best(capsys: pytest.CaptureFixture[str]) -> None:
    progress = NotebookProgress()
    progress.doing("searching", 3)
    best: Any = SimpleNamespace(candidate="ties x 0.5", mean=0.25)
    progress.trial(best, best)
    progress.done(1)
    progress.note("candidates \x1b[2K stay in files")
    del progress
    shown = capsys.readouterr().err
    assert "searching" in shown
    assert "1/3" in shown
    assert "best ties x 0.5 (0.25)" in shown
    assert r"candidates \x1b[2K stay in files" + "\n" in shown
