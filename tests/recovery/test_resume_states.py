"""Every state on the disk that an interruption can leave, made by hand, and what the same command makes of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import EMBEDDING, Q0, UP0, Family, actmat, contents, flip, hidden

from actmat.checkpoints.writing.staging import JOURNAL_NAME, Staging
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError


class Interrupted:
    """A family, what an undisturbed merge of it gives, and the state just before the first rename."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.family = Family.make(root, layers=2)
        self.place = root / "place"
        self.out = self.place / "out"
        self.partial = self.place / ".out.actmat-partial"
        self.journal = self.partial / JOURNAL_NAME
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "commit", self._stop)
            with pytest.raises(Stop):
                self.merge()
        self.expected = self._undisturbed()

    @staticmethod
    def _stop(stage: Staging) -> None:
        raise Stop

    def _undisturbed(self) -> dict[str, bytes]:
        kept = self.place.parent / "kept"
        self.place.rename(kept)
        assert self.merge() == 0
        expected = contents(self.out)
        shutil.rmtree(self.place)
        kept.rename(self.place)
        return expected

    def argv(self, *flags: str) -> list[str]:
        return [a for a in self.family.argv("--out", str(self.out), *flags) if a != "--quiet"]

    def merge(self, *flags: str) -> int:
        return actmat(self.argv(*flags)).code

    def resumed(self, *flags: str) -> int:
        """Finish it; how many tensors were taken over."""
        outcome = actmat(self.argv(*flags), code=0)
        assert hidden(self.place) == []
        _, found, rest = outcome.err.partition("interrupted merge: ")
        return int(rest.split()[0]) if found else 0

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines(keepends=True)


class Stop(BaseException):
    """The process dies here."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    """A state whose inputs a test may change."""
    return Interrupted(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    with pytest.MonkeyPatch.context() as patch:
        made = Interrupted(tmp_path_factory.mktemp("shared"), patch)
    shutil.copytree(made.place, made.family.root / "kept")
    return made


@pytest.fixture
def state(shared: Interrupted) -> Interrupted:
    """The state that all tests share, with what lies beside the output as it was."""
    shutil.rmtree(shared.place)
    shutil.copytree(shared.family.root / "kept", shared.place)
    return shared


def with_sixth(*given: str) -> Callable[[list[str]], list[str]]:
    """Other lines in place of the sixth."""
    return lambda lines: [*lines[:5], *(f"{line}\n" for line in given), *lines[6:]]


DAMAGE: dict[str, tuple[Callable[[list[str]], list[str]], int]] = {
    "torn": (lambda lines: [*lines[:-1], lines[-1][: len(lines[-1]) // 2]], 10),
    "no newline": (lambda lines: [*lines[:-1], lines[-1].rstrip("\n")], 10),
    "garbage": (with_sixth("\x00\xff\x00"), 4),
    "other json": (with_sixth("[1]", "7"), 4),
    "too deep": (with_sixth("[" * 100_000), 4),
    "a huge number": (with_sixth('{"name": ' + "1" * 5000 + "}"), 4),
    "unknown tensor": (lambda ls: [*ls, json.dumps(json.loads(ls[-1]) | {"name": "no.such.tensor"}) + "\n"], 11),
    "header torn": (lambda lines: [lines[0][:9]], 0),
    "header is no object": (lambda lines: ["[]\n", *lines[1:]], 0),
    "empty": (lambda lines: [], 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal(state: Interrupted, damage: str) -> None:
    edit, kept = DAMAGE[damage]
    state.journal.write_text("".join(edit(state.lines())), "latin-1")
    assert state.resumed() == kept
    assert contents(state.out) == state.expected


FIELDS = {
    "name": ["x"], "hash": 3, "hashes": {}, "base_hash": None, "expert_hashes": "ab", "stats": [], "unchanged": "no",
    "seconds": "long",
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["of another type", None, 10**400, [[]], {"a": {"b": 1}}])
def test_a_record_with_a_field_of_another_type(state: Interrupted, field: str, value: object) -> None:
    lines = state.lines()
    entry = json.loads(lines[5])
    if field == "stats" and isinstance(value, dict):
        value = {"error_norm": "x"}
    entry[field] = FIELDS[field] if value == "of another type" else value
    state.journal.write_text("".join(with_sixth(json.dumps(entry))(lines)))
    assert state.resumed() < len(lines) - 1
    assert contents(state.out) == state.expected


FILES: dict[str, tuple[Callable[[Path], object], int]] = {
    "damaged bytes": (lambda path: flip(path, -3), 10),
    "emptied": (lambda path: os.truncate(path, 0), 0),
    "cut in its header": (lambda path: os.truncate(path, 100), 0),
    "a byte short": (lambda path: os.truncate(path, path.stat().st_size - 1), 0),
    "gone": (Path.unlink, 0),
    "its journal gone": (lambda path: path.with_name(JOURNAL_NAME).unlink(), 0),
}
"""What a kill or a disk did to a shard, and how many tensors are taken over; the journal goes before the renames."""


@pytest.mark.parametrize("damage", FILES)
def test_what_a_shard_lost_is_done_again(state: Interrupted, damage: str) -> None:
    edit, kept = FILES[damage]
    edit(state.partial / "model.safetensors")
    assert state.resumed() == kept
    assert contents(state.out) == state.expected


@pytest.mark.parametrize("flags", [("--scale", "0.5"), ("--method", "average"), ("--set", "compute_dtype=float64")])
def test_another_recipe_takes_nothing_over(state: Interrupted, flags: tuple[str, ...]) -> None:
    assert state.resumed(*flags) == 0
    assert contents(state.out)["model.safetensors"] != state.expected["model.safetensors"]


def test_strangers_in_the_partial_folder_are_gone(state: Interrupted) -> None:
    (state.partial / "model-00001-of-00002.safetensors").write_text("of another recipe")
    (state.partial / "folder").mkdir()
    assert state.resumed("--scale", "0.5") == 0
    assert set(contents(state.out)) == set(state.expected)


@pytest.mark.parametrize("which", ["base", "expert"])
def test_a_changed_input_takes_nothing_over(own: Interrupted, which: str) -> None:
    """Same size, and the time of modification set back: the time of change still tells."""
    folder = own.family.base if which == "base" else own.family.experts[1]
    path = folder / "model.safetensors"
    before = path.stat()
    own.family.change(folder, lambda t: t[Q0].mul_(1.5))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert own.resumed() == 0
    fresh = own.family.root / "fresh" / "out"
    actmat(own.family.argv("--out", str(fresh)), code=0)
    assert contents(own.out) == contents(fresh)


def test_killed_between_the_renames(state: Interrupted) -> None:
    state.journal.unlink()
    previous = state.place / ".out.actmat-previous"
    shutil.copytree(state.partial, previous)
    outcome = actmat(state.argv(), code=1)
    assert str(previous) in outcome.err
    assert "--overwrite" in outcome.err
    assert previous.is_dir()
    state.resumed("--overwrite")
    assert contents(state.out) == state.expected


def test_a_lock_file_without_owner_is_no_obstacle(state: Interrupted) -> None:
    (state.place / ".out.actmat-lock").write_text("")
    assert state.resumed() == 11


def test_an_output_that_appears_meanwhile_is_not_replaced(state: Interrupted, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ShardWriter.finish

    def slow(writer: ShardWriter, specs: object) -> None:
        finish(writer, specs)
        state.out.mkdir()
        (state.out / "mine.txt").write_text("precious")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", slow)
        outcome = actmat(state.argv(), code=1)
    assert "is not empty" in outcome.err
    assert [p.name for p in state.out.iterdir()] == ["mine.txt"]
    shutil.rmtree(state.out)
    assert state.resumed() == 11
    assert contents(state.out) == state.expected


@pytest.mark.parametrize("damaged", [EMBEDDING, "lm_head.weight"])
def test_a_tensor_is_done_only_with_its_alias(damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied tensors stored twice share a line in the journal: both must hold the bytes."""
    family = Family.make(tmp_path, layers=1)
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
        edit_json(folder / "config.json", tie_word_embeddings=True)
    actmat(family.argv(), code=0)
    expected = contents(family.out)
    assert json.loads(expected["actmat_manifest.json"])["tensors"][-1]["action"] in ("tie", "merge", "average")
    assert b'"tie"' in expected["actmat_manifest.json"]
    shutil.rmtree(family.out)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "commit", Interrupted._stop)
        with pytest.raises(Stop):
            actmat(family.argv())
    partial = family.out.parent / f".{family.out.name}.actmat-partial"
    rows = [json.loads(line) for line in (partial / JOURNAL_NAME).read_text().splitlines()]
    (line,) = [row for row in rows if row.get("name") == EMBEDDING]
    assert set(line["hashes"]) == {EMBEDDING, "lm_head.weight"}
    names = [row["name"] for row in rows if "name" in row]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    data = (partial / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    flip(partial / "model.safetensors", header + json.loads(data[8:header])[damaged]["data_offsets"][1] - 1)
    outcome = actmat([a for a in family.argv() if a != "--quiet"], code=0)
    assert f"interrupted merge: {len(names) - 1} " in outcome.err
    assert contents(family.out) == expected


def test_several_outputs_resume_each_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path, layers=2)
    flags = ("--method", "average", "--method", "ties", "--option", "density=0.2,0.5")
    actmat(family.argv(*flags), code=0)
    names = ["average", "ties,density=0.2", "ties,density=0.5"]
    assert sorted(p.name for p in family.out.iterdir()) == names
    expected = {n: contents(family.out / n) for n in names}
    shutil.rmtree(family.out)
    append = Staging.record

    def die(stage: Staging, entry: dict[str, object]) -> None:
        if entry["name"] == UP0 and stage.out.name == names[1]:
            raise Stop
        append(stage, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "record", die)
        with pytest.raises(Stop):
            actmat(family.argv(*flags))
    actmat(family.argv(*flags), code=0)
    assert {n: contents(family.out / n) for n in names} == expected
    alone = tmp_path / "alone" / "x"
    actmat(family.argv("--method", "ties", "--option", "density=0.2", "--out", str(alone)), code=0)
    assert contents(alone)["model.safetensors"] == expected[names[1]]["model.safetensors"]


def test_the_lock_is_not_taken_on_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner removes the lock file when done: a lock on the removed file would lock nothing."""
    import fcntl

    flock, seen = fcntl.flock, []

    def remove_under_us(file: object, how: int) -> None:
        flock(file, how)
        if not seen:
            (tmp_path / ".out.actmat-lock").unlink()
        seen.append(file)

    monkeypatch.setattr(fcntl, "flock", remove_under_us)
    stage = Staging(tmp_path / "out", "fingerprint")
    stage.open()
    assert len(seen) == 2
    monkeypatch.undo()
    with pytest.raises(OutputError, match="Another actmat"):
        Staging(tmp_path / "out", "fingerprint").open()
    stage.close()
    stage.close()
    assert hidden(tmp_path) == [".out.actmat-partial"]
    other = Staging(tmp_path / "out", "fingerprint")
    other.open()
    stage.discard()  # has no lock any more: must leave the other's work alone
    assert other.path.is_dir()
    other.discard()
    assert hidden(tmp_path) == []
