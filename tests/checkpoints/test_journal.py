"""Journals: appended and read by place, whatever is at their end; shards that several processes write."""

import json
from pathlib import Path

import pytest

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.writing.journal import LENGTH_BITS, Journal
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import OutputLock
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError

HEAD = {"actmat_journal": 1, "fingerprint": "f"}


def written(path: Path, count: int = 3) -> Journal:
    journal = Journal(path)
    journal.start(HEAD)
    for n in range(count):
        journal.append({"name": f"t{n}", "value": "é" * n})
    return journal


def test_entries_are_read_from_their_places_while_and_after_they_are_written(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    journal.append({"name": "t1", "value": "again"})
    for found in (journal, Journal.read(tmp_path / "j")):
        assert list(found) == ["t0", "t1", "t2"]
        assert found["t1"] == {"name": "t1", "value": "again"}
        assert found["t2"]["value"] == "éé"
        assert found.head == HEAD
        assert "t3" not in found
    journal.close()
    journal.close()
    assert journal["t2"]["value"] == "éé"
    journal.drop("t2")
    assert len(journal) == 2
    with pytest.raises(KeyError):
        journal["t2"]


@pytest.mark.parametrize("noted", [False, True])
def test_a_line_that_a_signal_kept_from_being_noted_is_caught_up(
    tmp_path: Path, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = written(tmp_path / "j")
    journal.drop("t0")
    write = journal._write

    def interrupted(entry: dict[str, object]) -> int:
        length = write(entry)
        if noted:  # the signal comes one step later
            journal._places["t3"] = journal._good << LENGTH_BITS | length
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append({"name": "t3", "value": "x"})
    journal.catch_up()
    journal.catch_up()
    assert list(journal) == ["t1", "t2", "t3"], "what was dropped stays dropped"
    journal.append({"name": "t4", "value": "y"})
    assert [journal[n]["value"] for n in ("t3", "t4")] == ["x", "y"]
    (tmp_path / "j").rename(tmp_path / "aside")
    journal.catch_up()
    assert len(journal) == 4
    journal.close()


def test_a_journal_is_made_once(tmp_path: Path) -> None:
    written(tmp_path / "j").close()
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "j").start(HEAD)
    with pytest.raises(OutputError, match="expected a file, found a directory"):
        Journal.read(tmp_path)


@pytest.mark.parametrize("end", [b'{"name": "t9"', b'{"name": 9}\n{"name": "t9"}\n', b"\xff\n", b"[]\n", b"null\n"])
def test_a_damaged_end_is_cut_off_before_more_is_appended(tmp_path: Path, end: bytes) -> None:
    written(tmp_path / "j").close()
    with (tmp_path / "j").open("ab") as file:
        file.write(end)
    journal = Journal.read(tmp_path / "j")
    assert list(journal) == ["t0", "t1", "t2"]
    journal.resume()
    journal.append({"name": "t3"})
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert [line.get("name") for line in lines] == [None, "t0", "t1", "t2", "t3"]


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    file = journal._file
    assert file is not None

    class Full:
        """Takes ten bytes, then none."""

        def write(self, data: memoryview) -> int:
            if len(data) > 20:
                return file.write(data[:10])
            raise OSError(28, "full")

        def fileno(self) -> int:
            return file.fileno()

    vars(journal)["_file"] = Full()
    with pytest.raises(OSError, match="full"):
        journal.append({"name": "t4", "v": 1})
    journal._file = file
    journal.append({"name": "t5"})
    journal.close()
    assert list(Journal.read(tmp_path / "j")) == ["t0", "t1", "t2", "t5"]


def test_reading_takes_memory_for_places_only(tmp_path: Path) -> None:
    import tracemalloc

    journal = Journal(tmp_path / "j")
    journal.start(HEAD)
    for n in range(2000):
        journal.append({"name": f"t{n}", "value": "x" * 2000})
    journal.close()
    tracemalloc.start()
    found = Journal.read(tmp_path / "j")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 2000
    assert held < 400 * 2000, "about 200 bytes each, not 2000"


def test_two_writers_of_one_shard(tmp_path: Path) -> None:
    specs = [TensorSpec(n, (3,), "uint8", "") for n in "ab"]
    shards = plan_shards(specs, 1000)
    ShardWriter(tmp_path, shards, durable=False).close()
    first, second = (ShardWriter(tmp_path, shards, durable=False, attach="cached") for _ in range(2))
    first.sink("a").write(memoryview(b"123"))
    second.sink("b").write(memoryview(b"456"))
    first.sync()
    second.sync()
    content = ContentHash()
    content.update(b"123")
    third = ShardWriter(tmp_path, shards, attach="cached")
    assert third.holds("a", content.hexdigest())
    assert not third.holds("b", content.hexdigest())
    third.close()
    assert (tmp_path / shards[0].file).read_bytes().endswith(b"123456")
    (tmp_path / shards[0].file).unlink()
    with pytest.raises(OutputError):
        ShardWriter(tmp_path, shards, attach="cached")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        OutputLock(tmp_path / "out", tmp_path / "lock").take()
