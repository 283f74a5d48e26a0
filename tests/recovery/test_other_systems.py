"""Calls that only Linux has are taken away: a merge gives the same bytes, is locked, goes on and is verified.

This shows that nothing depends on them; it does not show that macOS or Windows work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.merging import Family, actmat
from tests.helpers.repository import SOURCES

from actmat import system

BLOCKED = """
import builtins, os, signal, sys
import torch, safetensors.torch, huggingface_hub, pydantic, rich.progress, typer, yaml, xxhash  # theirs to look after
for name in ("fcntl", "resource"):
    sys.modules[name] = None
gone = ["sched_getaffinity", "preadv", "posix_fadvise", "fdatasync", "getloadavg", "sysconf", "O_NOFOLLOW",
        "O_NONBLOCK", "O_CLOEXEC", "O_DSYNC", "O_SYNC", "O_DIRECTORY"]
for name in gone + json_more:
    if hasattr(os, name):
        delattr(os, name)
if hasattr(signal, "SIGHUP"):
    del signal.SIGHUP
opened = builtins.open
def open_without_proc(file, *arguments, **options):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(file)
    return opened(file, *arguments, **options)
builtins.open = open_without_proc
from actmat.cli.main import main
sys.argv = ["actmat", *arguments]
main()
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(tmp_path_factory.mktemp("family"), layers=2)


def blocked(arguments: list[str], more: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process without the calls; `more`: further names of `os`."""
    code = f"json_more, arguments = {more or []!r}, {arguments!r}\n{BLOCKED}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}


def test_a_merge_without_the_calls_of_linux_has_the_same_bytes(family: Family, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert actmat(family.argv("--out", str(theirs), "--max-shard-size", "2kB")).code == 0
    argv = [*family.argv("--out", str(ours), "--max-shard-size", "2kB"), "--diagnose"]
    argv[argv.index("--threads") + 1] = "2"
    done = blocked(argv, ["pread", "pwrite"])
    assert done.returncode == 0, done.stderr
    assert weights(ours) == weights(theirs)
    assert json.loads((ours / "report.json").read_text())["totals"]["peak_bytes"] == 0, "the system does not say"
    assert not list(tmp_path.glob(".*")), "no lock is left"
    again = blocked(argv)
    assert again.returncode == 0, again.stderr
    assert actmat(["verify", str(ours)]).code == 0


@pytest.mark.parametrize("gone", [(), ("preadv",), ("preadv", "pread", "pwrite")])
def test_reading_and_writing_at_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...]) -> None:
    for name in gone:
        monkeypatch.delattr(os, name)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert system.write_at(handle, memoryview(b"abcdef"), 4) == 6
        found = bytearray(4)
        assert system.read_at(handle, memoryview(found), 5) == 4
        assert bytes(found) == b"bcde"
        assert system.read_at(handle, memoryview(found), 8) == 2, "as much as there is"
        assert system.read_at(handle, memoryview(found), 100) == 0
    finally:
        os.close(handle)


def test_memory_and_cores_are_estimated_where_nothing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    sysconf = os.sysconf

    def mac(name: Any) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return sysconf(name)

    assert 0 < system.free_memory() <= system.total_memory()
    monkeypatch.setattr(os, "sysconf", mac)
    assert system.free_memory() == sysconf("SC_PHYS_PAGES") * sysconf("SC_PAGE_SIZE") // 2
    monkeypatch.delattr(os, "sysconf")
    assert system.free_memory() == system.total_memory() == system.UNKNOWN_MEMORY
    monkeypatch.delattr(os, "sched_getaffinity")
    assert system.usable_cores() == os.cpu_count()
    monkeypatch.setitem(sys.modules, "resource", None)
    assert system.peak_memory() == 0


def test_the_memory_of_windows_is_read_from_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(place: Any) -> None:
        place._obj.free, place._obj.total = 5 << 30, 16 << 30

    kernel = SimpleNamespace(GlobalMemoryStatusEx=state)
    monkeypatch.setattr(system.ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert system.free_memory() == 5 << 30
    monkeypatch.delattr(os, "sysconf")
    assert system.total_memory() == 16 << 30


def test_a_folder_takes_the_place_of_an_empty_one_where_rename_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def windows(source: Path, target: Path) -> None:
        if target.exists():
            raise FileExistsError(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", windows)
    for name in ("built", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "built" / "file").touch()
    system.rename_folder(tmp_path / "built", tmp_path / "out")
    assert (tmp_path / "out" / "file").exists()
    (tmp_path / "more").mkdir()
    with pytest.raises(OSError, match="not empty"):
        system.rename_folder(tmp_path / "more", tmp_path / "out")
    monkeypatch.delattr(os, "O_DIRECTORY")
    system.sync_directory(tmp_path / "not there")  # no folder is opened
