"""Searches that are interrupted where it hurts most: the same call again gives the same, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.tune.conftest import TEXTS

import actmat
from actmat.checkpoints.writing.lock import OutputLock
from actmat.errors import OutputError
from actmat.extras.tune import merges
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.tuning import LOCK


def tuned(family: Path, out: Path, **fields: Any) -> TuneReport:
    wanted: dict[str, Any] = {
        "data": {name: family / f"{name}.jsonl" for name in TEXTS},
        "space": {"methods": ["average", "ties"], "scales": [1.0]},
        "new_tokens": 0,
        "budget": 2,
    }
    return actmat.tune(family / "base", [family / "experts" / n for n in TEXTS], out=out, **{**wanted, **fields})


class Killed(BaseException):
    """In place of a signal."""


def kill(*args: Any, **fields: Any) -> Any:
    raise Killed


def test_a_full_disk_is_no_reason_against_a_method(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, the method would lose to a worse one, and the output would be another than without the fault."""
    module: Any = merges
    real = module.run_recipes

    def full(recipes: Any, settings: Any) -> Any:
        if any(r.method == "ties" for r in recipes):
            raise OutputError("Cannot write to x: the disk is full.")
        return real(recipes, settings)

    monkeypatch.setattr(merges, "run_recipes", full)
    with pytest.raises(OutputError, match="the disk is full"):
        tuned(family, tmp_path / "best")
    assert not (tmp_path / "best").exists()
    monkeypatch.undo()
    assert {t.candidate.merge.method for t in tuned(family, tmp_path / "best").trials} == {"average", "ties"}


def test_a_search_that_is_killed_after_its_last_merge_is_ended(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "best", tmp_path / "best.tune"
    monkeypatch.setattr(TuneReport, "save", kill)
    with pytest.raises(Killed):
        tuned(family, out)
    made = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert not (work / "tune.json").exists()
    monkeypatch.undo()
    found = tuned(family, out)
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == made, "what was finished is not made again"
    assert sorted(p.name for p in work.iterdir()) == ["recipe.yaml", "trials.jsonl", "tune.html", "tune.json"]
    assert json.loads((work / "tune.json").read_text())["chosen"] == json.loads(json.dumps(found.chosen.to_json()))
    with pytest.raises(OutputError, match="best"):
        tuned(family, out)


def test_a_search_that_is_killed_while_it_removes_its_merges_is_ended(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_in_part(folder: Path, **fields: Any) -> None:
        for path in [p for p in Path(folder).rglob("*") if p.is_file()][1:]:
            path.unlink()
        raise Killed

    monkeypatch.setattr("actmat.extras.tune.tuning.shutil.rmtree", remove_in_part)
    with pytest.raises(Killed):
        tuned(family, tmp_path / "best")
    monkeypatch.undo()
    tuned(family, tmp_path / "best")
    names = sorted(p.name for p in (tmp_path / "best.tune").iterdir())
    assert names == ["recipe.yaml", "trials.jsonl", "tune.html", "tune.json"]


def test_a_recipe_beside_another_output_does_not_make_it_ours(family: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "best", tmp_path / "best.tune"
    tuned(family, out)
    (work / "tune.json").unlink()
    weights = (out / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="exists and is not empty"):
        tuned(family, out, space={"methods": ["average"], "scales": [0.3]}, budget=1)
    assert (out / "model.safetensors").read_bytes() == weights
    recipe = yaml.safe_load((work / "recipe.yaml").read_text())
    assert recipe["scale"] == 0.3, "the search came to its end, and its output was refused"


def test_statistics_that_were_copied_in_part_are_copied_again(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "best"
    space = {"methods": ["regmean"], "scales": [1.0]}
    real = shutil.copytree

    def in_part(source: Path, target: Path, **fields: Any) -> None:
        real(source, target, **fields)
        for file in Path(target).iterdir():
            os.truncate(file, file.stat().st_size // 2)
        raise Killed

    monkeypatch.setattr("actmat.extras.tune.report.shutil.copytree", in_part)
    with pytest.raises(Killed):
        tuned(family, out, space=space)
    monkeypatch.undo()
    assert tuned(family, out, space=space).out == out
    assert actmat.verify(out).ok
    kept = sorted(p.name for p in (tmp_path / "best.tune" / "kept-statistics").iterdir())
    assert [n.partition("-")[0] for n in kept] == ["code", "math"]


def test_a_cut_line_of_the_journal_costs_one_trial(family: Path, tmp_path: Path) -> None:
    out, journal = tmp_path / "best", tmp_path / "best.tune" / "trials.jsonl"
    tuned(family, out)
    whole = journal.read_text()
    journal.write_text(whole[:-40])
    tuned(family, out, overwrite=True)
    lines = journal.read_text().splitlines()
    assert whole.splitlines()[-1] in lines, "it is not part of the cut line"
    assert len(lines) == 3


def test_two_searches_do_not_share_a_folder(family: Path, tmp_path: Path) -> None:
    out = tmp_path / "best"
    lock = OutputLock(out, tmp_path / "best.tune" / LOCK)
    lock.path.parent.mkdir()
    lock.take()
    with pytest.raises(OutputError, match="Another actmat is writing"):
        tuned(family, out)
    lock.release()
    tuned(family, out)
    assert not lock.path.exists()


def test_folders_of_the_user_are_not_removed(family: Path, tmp_path: Path) -> None:
    mine = tmp_path / "best.tune" / "merges" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match="holds 'merges', and no search made it"):
        tuned(family, tmp_path / "best")
    assert mine.read_text() == "mine"
