"""Stages on disk: found by everything that determines them, whole or not at all."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from actmat.errors import OutputError
from actmat_experiments.harness.cache import (
    Cache,
    canonical,
    code_digest,
    digest,
    file_digest,
    meaning,
)
from actmat_experiments.harness.merging import merging_code
from actmat_experiments.harness.training import Schedule


class Maker:
    def __init__(self, text: str = "made") -> None:
        self.calls, self.text, self.found = 0, text, []

    def __call__(self, out: Path) -> None:
        self.calls += 1
        self.found.append(sorted(p.name for p in out.iterdir()))
        (out / "result").write_text(self.text)


def test_a_finished_stage_is_not_made_again(tmp_path):
    cache, make = Cache(tmp_path), Maker()
    key = {"seed": 1, "rate": 0.1}
    first = cache.get("train", key, make)
    again = cache.get("train", {"rate": 0.1, "seed": 1}, make)
    assert (first, make.calls) == (again, 1)
    assert (first / "result").read_text() == "made"
    assert json.loads((first / "key.json").read_text()) == key
    assert first == tmp_path / "train" / digest(key)
    assert len(first.name) == 16


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1, "more": None}, {"seed": 1.5}, {"seeds": 1}])
def test_any_change_of_the_key_makes_it_anew(tmp_path, other):
    cache, make = Cache(tmp_path), Maker()
    cache.get("train", {"seed": 1}, make)
    assert not cache.holds("train", other)
    cache.get("train", other, make)
    assert make.calls == 2


def test_a_failed_stage_leaves_nothing_that_looks_finished(tmp_path):
    cache = Cache(tmp_path)

    def fail(out: Path) -> None:
        (out / "half").write_text("half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cache.get("train", {"seed": 1}, fail)
    assert not cache.holds("train", {"seed": 1})
    make = Maker()
    cache.get("train", {"seed": 1}, make)
    assert make.found == [[]], "an interrupted stage begins again in an empty folder"


def test_a_resumable_stage_finds_what_it_left(tmp_path):
    cache, make = Cache(tmp_path), Maker()

    def fail(out: Path) -> None:
        (out / "state").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get("train", {"seed": 1}, fail, resumable=True)
    cache.get("train", {"seed": 1}, make, resumable=True)
    assert make.found == [["state"]]


def test_only_what_is_missing_of_many_is_made(tmp_path):
    cache = Cache(tmp_path)
    cache.get("merge", {"row": "a"}, Maker("old"))
    asked = []

    def make(parts):
        asked.append(sorted(parts))
        for name, part in parts.items():
            (part / "result").write_text(name)

    keys = {name: {"row": name} for name in "abc"}
    done = cache.get_many("merge", keys, make)
    assert asked == [["b", "c"]]
    assert {n: (p / "result").read_text() for n, p in done.items()} == {"a": "old", "b": "b", "c": "c"}
    cache.get_many("merge", keys, make)
    assert len(asked) == 1


def test_two_at_once_make_one(tmp_path):
    cache, make, gate = Cache(tmp_path), Maker(), threading.Barrier(2)

    def get() -> None:
        gate.wait()
        cache.get("train", {"seed": 1}, make)

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1


@pytest.mark.parametrize("value", [Path("/data"), float("nan"), object(), {1, 2}])
def test_a_key_that_does_not_say_what_it_contains_is_refused(value):
    with pytest.raises(TypeError, match="cache key"):
        canonical({"x": value})


def test_dataclasses_and_tuples_are_plain_data():
    found = json.loads(canonical({"schedule": Schedule(1, 2, 0.5), "names": ("a", "b")}))
    assert found == {"names": ["a", "b"], "schedule": asdict(Schedule(1, 2, 0.5))}


def test_another_key_under_the_same_digits_is_an_error(tmp_path):
    cache, make = Cache(tmp_path), Maker()
    place = cache.get("train", {"seed": 1}, make)
    (place / "key.json").write_text('{"seed": 2}\n')
    with pytest.raises(OutputError, match="does not match"):
        cache.get("train", {"seed": 1}, make)


def test_a_place_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="--cache"):
        Cache(tmp_path / "file").get("train", {"seed": 1}, Maker())
    with pytest.raises(ValueError, match="not a valid stage name"):
        Cache(tmp_path).get("../train", {}, Maker())


def test_the_hash_of_files_is_that_of_names_and_bytes(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    before = file_digest([tmp_path / "a", tmp_path / "b"])
    assert file_digest([tmp_path / "b", tmp_path / "a"]) == before
    (tmp_path / "b").write_text("3")
    assert file_digest([tmp_path / "a", tmp_path / "b"]) != before


MODULE = '''"""What it is."""

LIMIT = 3
"""Of something."""


def f(x):
    """Doubles."""
    return 2 * x  # exactly


class A:
    """Only a docstring."""
'''


@pytest.mark.parametrize(
    "same",
    [
        MODULE.replace("What it is.", "What it is, said better."),
        MODULE.replace('"""Of something."""\n', ""),
        MODULE.replace('    """Doubles."""\n', ""),
        MODULE.replace("  # exactly", ""),
        MODULE.replace('"""Only a docstring."""', "pass"),
        MODULE.replace("2 * x", "(2\n    * x)"),
    ],
)
def test_code_is_the_same_when_only_its_text_for_readers_changes(same):
    assert same != MODULE
    assert meaning(same) == meaning(MODULE)


@pytest.mark.parametrize(
    ("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("2 * x", "x * 2"), ("class A", "class B"), ("def f(x):", "def f(y):")]
)
def test_code_that_does_something_else_is_another(old, new):
    assert meaning(MODULE.replace(old, new)) != meaning(MODULE)


def test_the_code_of_merges_is_of_layers_that_are_there() -> None:
    assert merging_code() == merging_code()
    with pytest.raises(AssertionError, match="renamed"):
        code_digest("linalg", "plan")
