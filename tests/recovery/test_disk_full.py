"""A full disk: told with what is free, nothing left behind, inputs untouched."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.merging import Family, actmat, hidden

from actmat.checkpoints.writing.writer import ShardWriter


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, layers=40)


def snapshot(family: Family) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for folder in (family.base, *family.experts) for p in folder.iterdir()}


def refused(family: Family, out: Path, *flags: str, says: str) -> str:
    before = snapshot(family)
    outcome = actmat(family.argv("--out", str(out), *flags))
    assert outcome.code == 1, outcome
    assert says in outcome.err
    assert re.search(r"\d (B|kB|MB|GB) free", outcome.err)
    assert "--out" in outcome.err
    assert not out.exists()
    assert hidden(out.parent) == []
    assert snapshot(family) == before
    return outcome.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_too_small_a_disk_is_seen_before_the_work(family: Family, small_disk: Path) -> None:
    message = refused(family, small_disk / "out", says="the disk has only")
    assert re.search(r"needs [\d.]+ kB, but the disk has only [34]\d.* kB free", message)


def test_several_outputs_must_fit_together(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    size = sum(f.stat().st_size for f in family.base.glob("*.safetensors"))
    monkeypatch.setattr("shutil.disk_usage", lambda place: real(place)._replace(free=size * 3 // 2))
    message = refused(family, family.out, "--method", "average", "--method", "linear", says="the disk has only")
    assert "out/average" in message
    assert "out/linear" in message
    assert actmat(family.argv("--method", "average")).code == 0


def test_a_disk_that_fills_up_meanwhile(family: Family, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actmat.output._check_room", lambda stages, plans: None)
    refused(family, small_disk / "out", says="the disk is full")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails(family: Family, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real, calls = os.pwrite, []

    def pwrite(handle: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 50:
            raise OSError(number, os.strerror(number))
        return real(handle, data[: max(1, len(data) // 2)], offset)  # short writes are legal

    monkeypatch.setattr(os, "pwrite", pwrite)
    refused(family, family.out, says="Cannot write to")


def test_short_writes_are_completed(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    assert actmat(family.argv()).code == 0
    expected = (family.out / "model.safetensors").read_bytes()
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[: max(1, len(data) // 2)], at))
    assert actmat(family.argv("--out", str(family.root / "short"))).code == 0
    assert (family.root / "short" / "model.safetensors").read_bytes() == expected


def test_a_limit_on_the_size_of_files(family: Family) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        refused(family, family.out, says="does not take a file of this size")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_lost_in_the_background_is_told(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports a failed write-back once, to whoever syncs first: the background flusher."""

    def fdatasync(handle: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr("actmat.checkpoints.writing.writer._FLUSH_BYTES", 1)
    finish = ShardWriter.finish

    def wait_for_the_flusher(writer: ShardWriter, specs: object) -> None:
        while writer._flush_error is None:
            pass
        finish(writer, specs)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "finish", wait_for_the_flusher)
    refused(family, family.out, says="input/output error")


def test_a_failing_last_sync_is_told(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fsync)
    refused(family, family.out, says="the disk is full")


def test_a_sidecar_that_cannot_be_written(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def copyfileobj(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("shutil.copyfileobj", copyfileobj)
    refused(family, family.out, says="the disk is full")


def test_a_name_that_is_too_long(family: Family) -> None:
    outcome = actmat(family.argv("--out", str(family.root / ("x" * 250))))
    assert outcome.code == 1
    assert "too long" in outcome.err
