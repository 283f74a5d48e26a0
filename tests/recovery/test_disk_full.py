"""A full disk: told with what is free, inputs untouched; what is done is kept, and the same command goes on."""

import errno
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.diffusion.test_files import lora
from tests.helpers.merging import Family, actmat, contents, hidden

from actmat.checkpoints.writing.staging import JOURNAL_NAME
from actmat.checkpoints.writing.writer import ShardWriter

LAYERS = 16
TENSORS = 4 * LAYERS + 3


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=LAYERS)


def snapshot(family: Family) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for folder in (family.base, *family.experts) for p in folder.iterdir()}


def refused(family: Family, out: Path, *flags: str, says: str) -> str:
    before = snapshot(family)
    outcome = actmat(family.argv("--out", str(out), *flags), code=1)
    assert says in outcome.err
    assert re.search(r"\d (B|kB|MB|GB) free", outcome.err)
    assert "--out" in outcome.err
    assert not out.exists()
    assert hidden(out.parent) == []
    assert snapshot(family) == before
    return outcome.err


def stopped(family: Family, out: Path, *, says: str, code: int = 1) -> int:
    """A merge that fails on its way; number of tensors that it says are kept."""
    before = snapshot(family)
    outcome = actmat(family.argv("--out", str(out)), code=code)
    assert says in outcome.err
    assert not out.exists()
    assert hidden(out.parent) == [".out.actmat-partial"]
    assert snapshot(family) == before
    said = re.search(r"(\d+) of (\d+) tensors are kept; the same command goes on where it stopped", outcome.err)
    assert said is not None, outcome.err
    assert int(said[2]) == TENSORS
    return int(said[1])


def goes_on(family: Family, out: Path, kept: int) -> None:
    """The same command takes over what was kept and gives what an undisturbed one gives."""
    outcome = actmat([a for a in family.argv("--out", str(out)) if a != "--quiet"], code=0)
    assert f"interrupted merge: {kept} tensors are done" in outcome.err
    assert hidden(out.parent) == []
    undisturbed = out.parent.with_name("undisturbed") / "out"
    actmat(family.argv("--out", str(undisturbed)), code=0)
    assert contents(out) == contents(undisturbed)


@pytest.fixture
def out(family: Family) -> Path:
    return family.root / "place" / "out"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_several_outputs_must_fit_together(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    size = sum(f.stat().st_size for f in family.base.glob("*.safetensors"))
    monkeypatch.setattr("shutil.disk_usage", lambda place: real(place)._replace(free=size * 3 // 2))
    message = refused(family, family.out, "--method", "average", "--method", "linear", says="the disk has only")
    assert "out/average" in message
    assert "out/linear" in message
    actmat(family.argv("--method", "average"), code=0)


def test_a_disk_that_fills_up_meanwhile(family: Family, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("actmat.run.output.check_room", lambda stages, plans: None)
        kept = stopped(family, small_disk / "out", says="No space left on device")
    assert 0 < kept < TENSORS
    again = stopped(family, small_disk / "out", says="the disk has only")  # seen before the work, which is still kept
    assert again >= kept - 1  # the last line of the journal may have been cut
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    goes_on(family, small_disk / "out", again)


def half_written(handle: int, data: memoryview, offset: int, real: Any = os.pwrite) -> int:
    """Short writes are legal."""
    return int(real(handle, data[: max(1, len(data) // 2)], offset))


@pytest.mark.parametrize(
    ("call", "real", "number", "says"),
    [
        *(("pwrite", half_written, n, "Cannot write to") for n in (errno.ENOSPC, errno.EDQUOT, errno.EIO)),
        ("preadv", os.preadv, errno.EIO, "reading failed"),
    ],
)
def test_a_write_or_a_read_that_fails(
    call: str, real: Any, number: int, says: str, family: Family, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def fails_at_last(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > (50 if call == "pwrite" else 100):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails_at_last)
        kept = stopped(family, out, says=says)
    assert 0 < kept < (50 if call == "pwrite" else TENSORS)
    goes_on(family, out, kept)


def test_nothing_is_left_where_nothing_was_finished(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", full)
    assert "kept" not in refused(family, family.out, says="Cannot write to")
    outcome = actmat(family.argv("--out", str(family.root / "deep" / "place" / "out")))
    assert (outcome.code, (family.root / "deep").exists()) == (1, False)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_the_size_of_files(family: Family) -> None:
    with files_of_at_most(1000):
        refused(family, family.out, says="File too large")


def test_a_write_lost_in_the_background_is_told(family: Family, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports a failed write-back once, to whoever syncs first: the background flusher."""

    def fdatasync(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr("actmat.checkpoints.writing.writer._FLUSH_BYTES", 1)
    finish = ShardWriter.finish

    def wait_for_the_flusher(writer: ShardWriter, specs: object) -> None:
        while writer._flush_error is None:
            pass
        finish(writer, specs)

    monkeypatch.setattr(ShardWriter, "finish", wait_for_the_flusher)
    assert stopped(family, out, says="Input/output error") == TENSORS
    monkeypatch.undo()
    goes_on(family, out, TENSORS)


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["os.fsync", "shutil.copyfileobj"], ids=["last sync", "sidecar"])
def test_a_last_step_that_fails(family: Family, out: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        assert stopped(family, out, says="No space left on device") == TENSORS
    goes_on(family, out, TENSORS)


@pytest.mark.parametrize("call", ["replace", "rename"])
def test_a_rename_that_fails(family: Family, out: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The journal is put aside before the folder is renamed, and back when that fails."""
    real = getattr(os, call)

    def fails(source: Path, target: Path) -> None:
        if source.name == JOURNAL_NAME or target == out:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        outcome = actmat(family.argv("--out", str(out)))
    assert (outcome.code, out.exists()) == (1, False)
    assert f"{TENSORS} of {TENSORS} tensors are kept" in outcome.err
    goes_on(family, out, TENSORS)


def test_a_bug_on_the_way_keeps_what_is_done(
    family: Family, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(writer: ShardWriter, specs: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", finish)
        patch.setattr(tempfile, "tempdir", str(tmp_path))  # of the report
        outcome = actmat(family.argv("--out", str(out)), code=3)
    assert f"{TENSORS} of {TENSORS} tensors are kept; the same command goes on where it stopped." in outcome.err
    goes_on(family, out, TENSORS)


def test_a_name_that_is_too_long(family: Family) -> None:
    outcome = actmat(family.argv("--out", str(family.root / ("x" * 250))), code=1)
    assert "too long" in outcome.err


@pytest.mark.parametrize("to", ["comfy", "diffusers"])
@pytest.mark.parametrize("size", [10, 300])
def test_an_export_on_a_full_disk_is_no_bug(family: Family, to: str, size: int) -> None:
    given = lora(family.root / "kohya.safetensors", 1, "kohya")
    before = {p.name for p in family.root.iterdir()}
    with files_of_at_most(size):
        done = actmat(["export", given, "--to", to, "--out", family.root / "out.safetensors"], code=1)
    assert "Cannot write to" in done.err
    assert {p.name for p in family.root.iterdir()} == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_that_a_library_meets_is_no_bug(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actmat.cli.main.app", lambda: (_ for _ in ()).throw(error))
    done = actmat(["methods"])
    assert (done.code, "this is a bug" in done.err) == (1, False)
    assert os.strerror(errno.ENOSPC) in done.err
