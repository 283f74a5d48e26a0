"""The note on ranks is shown once per project, and every time where that cannot be remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from actmat.cli.once import is_first_time, state_file
from tests.helpers.docs_fixture import write_models
from tests.helpers.merging import actmat

from actmat.cli import once
from actmat.planning.adapter.notes import INDEPENDENT


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_once_per_note_and_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_first_time("ranks") for _ in range(3)] == [True, False, False]
    assert is_first_time("another")
    (home / "other").mkdir()
    monkeypatch.chdir(home / "other")
    assert [is_first_time("ranks") for _ in range(2)] == [True, False]
    monkeypatch.chdir(home)
    assert not is_first_time("ranks")
    assert [p.name for p in state_file().parent.iterdir()] == ["shown.json"]


@pytest.mark.parametrize("content", ["", "{", "[1, null]", "{}", '"text"', "\udcff"])
def test_a_damaged_memory_is_none(home: Path, content: str) -> None:
    state_file().parent.mkdir(parents=True)
    state_file().write_bytes(content.encode("utf-8", "surrogateescape"))
    assert [is_first_time("ranks") for _ in range(2)] == [True, False]


def test_where_nothing_can_be_written_it_is_always_the_first_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    assert [is_first_time("ranks") for _ in range(2)] == [True, True]
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "expanduser", _homeless)
    assert is_first_time("ranks")


def _homeless(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_only_the_latest_projects_are_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "MOST", 2)
    assert all(is_first_time(note) for note in ("a", "b", "c"))
    assert [is_first_time(note) for note in ("c", "b")] == [False, False]
    assert is_first_time("a")


def test_a_plan_of_small_ranks_says_so_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_models(home)
    argv = ["plan", "-e", "adapters/math", "-e", "adapters/code"]
    said = [" ".join(actmat(argv).out.split()) for _ in range(2)]
    assert [INDEPENDENT in text for text in said] == [True, False]
    assert INDEPENDENT in actmat([*argv, "--json"]).out, "data have every note"
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert all(INDEPENDENT in " ".join(actmat(argv).out.split()) for _ in range(2))
