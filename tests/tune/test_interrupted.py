"""Searches that are interrupted where it hurts most: the same call again gives the same, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.family import tuned

import actmat
from actmat.checkpoints.writing.staging import OutputLock
from actmat.errors import MergeError, OutputError, StatisticsError
from actmat.extras.tune import merges
from actmat.extras.tune.tuning import LOCK


class Killed(BaseException):
    """In place of a signal."""


def kill(*args: Any, **fields: Any) -> Any:
    raise Killed


@pytest.mark.parametrize("error", [OutputError("the disk is full"), StatisticsError("statistics cannot be read")])
def test_a_disk_that_fails_is_no_reason_against_a_method(
    error: MergeError, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, the method would lose to a worse one, and the output would be another than without the fault."""
    module: Any = merges
    real = module.run_recipes

    def full(recipes: Any, settings: Any, progress: Any, **named: Any) -> Any:
        if any(r.method == "ties" for r in recipes):
            raise error
        return real(recipes, settings, progress, **named)

    monkeypatch.setattr(merges, "run_recipes", full)
    with pytest.raises(type(error), match=str(error)):
        tuned(family, tmp_path / "best")
    assert not (tmp_path / "best").exists()
    monkeypatch.undo()
    assert {t.candidate.merge.method for t in tuned(family, tmp_path / "best").trials} == {"average", "ties"}


def remove_in_part(folder: Path, **fields: Any) -> None:
    for path in [p for p in Path(folder).rglob("*") if p.is_file()][1:]:
        path.unlink()
    raise Killed


@pytest.mark.parametrize(
    ("where", "killed", "method"),
    [
        ("report.TuneReport.save", kill, "ties"),
        ("tuning.shutil.rmtree", remove_in_part, "ties"),
    ],
    ids=["after its last merge", "while merges are removed"],
)
def test_a_search_that_is_killed_is_ended_by_the_same_call(
    where: str, killed: Any, method: str, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "best", tmp_path / "best.tune"
    space = {"methods": [method], "scales": [1.0]}
    monkeypatch.setattr(f"actmat.extras.tune.{where}", killed)
    with pytest.raises(Killed):
        tuned(family, out, space=space)
    monkeypatch.undo()
    made = {p.name: p.stat().st_mtime_ns for p in out.iterdir()} if out.exists() else {}
    assert not (work / "tune.json").exists()
    found = tuned(family, out, space=space)
    again = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert again == (made or again), "what was finished is not made again"
    assert actmat.verify(out).ok
    files = ["recipe.yaml", "trials.jsonl", "tune.html", "tune.json"]
    assert sorted(p.name for p in work.iterdir()) == files
    assert json.loads((work / "tune.json").read_text())["chosen"] == json.loads(json.dumps(found.chosen.to_json()))
    with pytest.raises(OutputError, match="best"):
        tuned(family, out, space=space)


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
