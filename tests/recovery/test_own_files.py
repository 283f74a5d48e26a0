"""`--overwrite` replaces an earlier output, and deletes no file that the output's manifest does not record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat, contents, hidden

from actmat.checkpoints.writing.listed import MANIFEST_NAME, unlisted_files
from actmat.checkpoints.writing.staging import SHOWN_FILES, Staging
from actmat.errors import OutputError


@pytest.fixture
def family(tmp_path: Path) -> Family:
    made = Family.make(tmp_path, layers=1)
    assert actmat(made.argv("--set", "durable=false", "--diagnose")).code == 0
    return made


def add_own(out: Path) -> None:
    (out / "MY_NOTES.txt").write_text("best so far")
    (out / "eval").mkdir()
    (out / "eval" / "scores.json").write_text("{}")
    (out / "empty").mkdir()
    (out / "link").symlink_to("MY_NOTES.txt")


def test_a_users_own_files_stop_a_merge_and_are_all_named(family: Family) -> None:
    assert unlisted_files(family.out) == []
    add_own(family.out)
    before = sorted(p.relative_to(family.out) for p in family.out.rglob("*"))
    refused = actmat(family.argv("--overwrite", "--method", "average"))
    assert refused.code == 1
    said = " ".join(refused.err.split())
    assert "--overwrite will not delete: MY_NOTES.txt, empty/, eval/, link. Move them elsewhere" in said
    assert sorted(p.relative_to(family.out) for p in family.out.rglob("*")) == before
    assert hidden(family.root) == []
    for name in ("MY_NOTES.txt", "link"):
        (family.out / name).unlink()
    for name in ("eval", "empty"):
        shutil.rmtree(family.out / name)
    assert actmat(family.argv("--overwrite", "--method", "average")).code == 0


def test_files_that_come_while_the_merge_runs(family: Family) -> None:
    """The last look is before the rename; what is merged is kept, and the same command goes on."""
    stage = Staging(family.out, "of another recipe", overwrite=True)
    stage.open()
    add_own(family.out)
    with pytest.raises(OutputError, match=r"MY_NOTES\.txt, empty/, eval/, link"):
        stage.commit()
    stage.close()
    assert (family.out / "eval" / "scores.json").is_file()
    assert stage.path.is_dir()


def test_an_extraction_deletes_no_own_files(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1, experts=1)
    argv = [
        "extract",
        "-b",
        str(family.base),
        "--model",
        str(family.experts[0]),
        "--out",
        str(family.out),
        "--rank",
        "2",
    ]
    assert actmat(argv).code == 0
    expected = contents(family.out)
    (family.out / "MY_NOTES.txt").write_text("x")
    refused = actmat([*argv, "--overwrite"])
    assert refused.code == 1
    assert "MY_NOTES.txt" in refused.err
    (family.out / "MY_NOTES.txt").unlink()
    assert actmat([*argv, "--overwrite"]).code == 0
    assert contents(family.out) == expected


def test_a_damaged_manifest_lists_nothing(family: Family) -> None:
    (family.out / MANIFEST_NAME).write_text("{")
    refused = actmat(family.argv("--overwrite"))
    assert refused.code == 1
    assert "its manifest is damaged" in refused.err
    assert (family.out / "model.safetensors").is_file()


def test_many_own_files_are_counted(family: Family) -> None:
    for n in range(SHOWN_FILES + 3):
        (family.out / f"{n:02}.txt").touch()
    assert "19.txt and 3 more. Move them elsewhere" in " ".join(actmat(family.argv("--overwrite")).err.split())
