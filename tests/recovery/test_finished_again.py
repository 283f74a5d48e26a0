"""A finished merge that is asked for again is recognized; `--overwrite` deletes no file that it did not write."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.adapters import save_adapter
from tests.helpers.merging import Q0, Family, actmat, contents, hidden

import actmat as library
from actmat.checkpoints.writing.listed import MANIFEST_NAME, unlisted_files
from actmat.checkpoints.writing.staging import Staging
from actmat.errors import OutputError

# A finished merge that is asked for again is not refused; anything else in its place still is.


@pytest.fixture
def family(tmp_path: Path) -> Family:
    made = Family.make(tmp_path, layers=2)
    actmat(made.argv(), code=0)
    return made


def loud(family: Family, *flags: str) -> list[str]:
    return [a for a in family.argv(*flags) if a != "--quiet"]


def state(out: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in out.iterdir()}


def test_the_same_command_says_that_it_is_complete(family: Family) -> None:
    before = state(family.out)
    outcome = actmat(loud(family), code=0)
    assert "already complete" in outcome.out
    assert state(family.out) == before, "nothing is written again"
    assert actmat(family.argv()).out == "", "quiet is quiet"


def test_what_was_left_after_the_last_rename_is_removed(family: Family) -> None:
    shutil.copytree(family.out, family.root / ".out.actmat-previous")
    for name in ("journal", "lock"):
        (family.root / f".out.actmat-{name}").write_text("")
    actmat(family.argv(), code=0)
    assert hidden(family.root) == []


def test_an_output_that_was_finished_before_the_lock_was_taken(family: Family) -> None:
    """Another process finished it after this one found the place empty: nothing is merged again, nothing left."""
    plan = library.plan(family.base, family.experts)
    stage = Staging(family.out, plan.fingerprint())
    with pytest.raises(library.OutputError, match="not empty"):
        stage.open()
    stage.discard()
    assert hidden(family.root) == []


def test_only_an_unfinished_folder_of_the_same_merge_is_removed(family: Family) -> None:
    plan = library.plan(family.base, family.experts)
    for fingerprint, left in ((plan.fingerprint(), []), ("of another recipe", [".out.actmat-partial"])):
        stage = Staging(family.out, fingerprint, overwrite=True)
        stage.open()
        stage.close()
        assert hidden(family.root) == [".out.actmat-partial"]
        actmat(family.argv(), code=0)
        assert hidden(family.root) == left


def test_the_report_of_a_finished_merge(family: Family) -> None:
    report = library.merge(family.base, family.experts, out=family.out)
    assert report.was_finished
    assert report.resumed == 11
    assert report.manifest == json.loads((family.out / MANIFEST_NAME).read_text())
    again = library.merge(family.base, family.experts, out=family.out, overwrite=True)
    assert not again.was_finished
    assert again.resumed == 0


OTHER: dict[str, tuple[Callable[[Family], object], tuple[str, ...], str]] = {
    "expert changed": (lambda f: f.change(f.experts[0], lambda t: t[Q0].mul_(2)), (), "files of its inputs"),
    "diagnosis wanted": (lambda f: None, ("--diagnose",), "without --diagnose"),
}


@pytest.mark.parametrize("case", OTHER)
def test_an_output_that_is_not_the_same_is_refused(family: Family, case: str) -> None:
    edit, flags, says = OTHER[case]
    edit(family)
    before = state(family.out)
    outcome = actmat(family.argv(*flags), code=1)
    assert "exists and is not empty" in outcome.err
    assert says in outcome.err
    assert state(family.out) == before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"actmat_manifest": 1}', "\x00"])
def test_a_damaged_manifest_is_no_recognized_output(family: Family, text: str) -> None:
    (family.out / MANIFEST_NAME).write_text(text)
    outcome = actmat(family.argv())
    assert (outcome.code, "exists and is not empty" in outcome.err) == (1, True)


def test_relative_paths_from_elsewhere_are_other_inputs(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["merge", "-b", "base", "-e", "expert0", "-e", "expert1", "--out", str(family.root / "there")]
    monkeypatch.chdir(family.root)
    actmat(argv, code=0)
    elsewhere = Family.make(family.root / "elsewhere", layers=2)
    elsewhere.change(elsewhere.experts[0], lambda t: t[Q0].mul_(2))
    monkeypatch.chdir(elsewhere.root)
    outcome = actmat(argv)
    assert (outcome.code, "files of its inputs" in outcome.err) == (1, True)
    monkeypatch.chdir(family.root)
    actmat(argv, code=0)


def test_of_several_outputs_only_the_missing_ones_are_made(family: Family) -> None:
    """As after a kill between two final renames."""
    flags = ("--method", "average", "--method", "linear", "--out", str(family.root / "many"))
    actmat(family.argv(*flags), code=0)
    many = family.root / "many"
    before, expected = state(many / "average"), contents(many / "linear")
    shutil.rmtree(many / "linear")
    outcome = actmat([a for a in family.argv(*flags) if a != "--quiet"], code=0)
    assert state(many / "average") == before
    assert contents(many / "linear") == expected
    assert outcome.out.count("already complete") == 1


def test_an_adapter_too(tmp_path: Path) -> None:
    experts = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(experts):
        save_adapter(folder, "llama", seed)
    first = library.merge(None, experts, out=tmp_path / "out")
    again = library.merge(None, experts, out=tmp_path / "out")
    assert (first.was_finished, again.was_finished) == (False, True)


# `--overwrite` replaces an earlier output, and deletes no file that the output's manifest does not record.


@pytest.fixture
def files_family(tmp_path: Path) -> Family:
    made = Family.make(tmp_path, layers=1)
    actmat(made.argv("--set", "durable=false", "--diagnose"), code=0)
    return made


def add_own(out: Path) -> None:
    (out / "MY_NOTES.txt").write_text("best so far")
    (out / "eval").mkdir()
    (out / "eval" / "scores.json").write_text("{}")
    (out / "empty").mkdir()
    (out / "link").symlink_to("MY_NOTES.txt")


def test_a_users_own_files_stop_a_merge_and_are_all_named(files_family: Family) -> None:
    assert unlisted_files(files_family.out) == []
    add_own(files_family.out)
    before = sorted(p.relative_to(files_family.out) for p in files_family.out.rglob("*"))
    refused = actmat(files_family.argv("--overwrite", "--method", "average"), code=1)
    said = refused.words
    assert "--overwrite will not delete: MY_NOTES.txt, empty/, eval/, link. Move them elsewhere" in said
    assert sorted(p.relative_to(files_family.out) for p in files_family.out.rglob("*")) == before
    assert hidden(files_family.root) == []
    for name in ("MY_NOTES.txt", "link"):
        (files_family.out / name).unlink()
    for name in ("eval", "empty"):
        shutil.rmtree(files_family.out / name)
    actmat(files_family.argv("--overwrite", "--method", "average"), code=0)


def test_files_that_come_while_the_merge_runs(files_family: Family) -> None:
    """The last look is before the rename; what is merged is kept, and the same command goes on."""
    stage = Staging(files_family.out, "of another recipe", overwrite=True)
    stage.open()
    add_own(files_family.out)
    with pytest.raises(OutputError, match=r"MY_NOTES\.txt, empty/, eval/, link"):
        stage.commit()
    stage.close()
    assert (files_family.out / "eval" / "scores.json").is_file()
    assert stage.path.is_dir()


def test_an_extraction_deletes_no_own_files(tmp_path: Path) -> None:
    files_family = Family.make(tmp_path, layers=1, experts=1)
    inputs = ["-b", str(files_family.base), "--model", str(files_family.experts[0])]
    argv = ["extract", *inputs, "--out", str(files_family.out), "--rank", "2"]
    actmat(argv, code=0)
    expected = contents(files_family.out)
    (files_family.out / "MY_NOTES.txt").write_text("x")
    refused = actmat([*argv, "--overwrite"], code=1)
    assert "MY_NOTES.txt" in refused.err
    (files_family.out / "MY_NOTES.txt").unlink()
    actmat([*argv, "--overwrite"], code=0)
    assert contents(files_family.out) == expected


def test_a_damaged_manifest_lists_nothing(files_family: Family) -> None:
    (files_family.out / MANIFEST_NAME).write_text("{")
    refused = actmat(files_family.argv("--overwrite"), code=1)
    assert "its manifest is damaged" in refused.err
    assert (files_family.out / "model.safetensors").is_file()
