"""Calls that only Linux has are taken away: a merge gives the same bytes, is locked, goes on and is verified.

This shows that nothing depends on them; it does not show that macOS or Windows work.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.merging import Family, actmat
from tests.helpers.repository import SOURCES

from actmat import system
from actmat.bounds import is_url
from actmat.checkpoints.folder import is_plain_name
from actmat.checkpoints.writing.staging import check_output_path
from actmat.cli.flags import split_name
from actmat.extras.averaging.recipe import distinct_names

BLOCKED = """
import builtins, os, signal, sys
import torch, safetensors.torch, huggingface_hub, pydantic, rich.progress, typer, yaml, xxhash  # theirs to look after
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
gone = ["sched_getaffinity", "preadv", "posix_fadvise", "fdatasync", "getloadavg", "sysconf", "O_NOFOLLOW",
        "O_NONBLOCK", "O_CLOEXEC", "O_DSYNC", "O_SYNC", "O_DIRECTORY",
        "fork", "getuid", "geteuid", "symlink", "link", "mkfifo", "killpg"]
for name in gone + json_more:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL"):
    if hasattr(signal, name):
        delattr(signal, name)
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
    actmat(family.argv("--out", str(theirs), "--set", "max_shard_size=2kB"), code=0)
    argv = [*family.argv("--out", str(ours), "--set", "max_shard_size=2kB"), "--diagnose"]
    argv[argv.index("--threads") + 1] = "2"
    done = blocked(argv, ["pread", "pwrite"])
    assert done.returncode == 0, done.stderr
    assert weights(ours) == weights(theirs)
    assert not list(tmp_path.glob(".*")), "no lock is left"
    again = blocked(argv)
    assert again.returncode == 0, again.stderr
    actmat(["verify", ours], code=0)


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


LEFT = "import os, signal, actmat.system as s; print(s.temporary_folder('test')[0], flush=True); "
ENDS = {"killed": "os.kill(os.getpid(), signal.SIGKILL)", "alive": "input()"}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("age", [0, 100])
def test_temporary_folders_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, age: int
) -> None:
    """By the next process; not those of one that runs, nor of one that may be about to lock its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", LEFT + ENDS[end]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        left = Path(process.stdout.readline().strip())
        if end == "killed":
            process.wait()
        (left / "model.safetensors").touch()
        os.utime(left, (time.time() - age,) * 2)
        other, link = tmp_path / "actmat-other.x", tmp_path / "actmat-test.link"
        other.mkdir()
        link.symlink_to(other)
        own, remove = system.temporary_folder("test")
        assert left.exists() == (end == "alive" or not age)
        remove()
        remove()
        assert not own.exists()
        assert other.exists()
        if end == "alive":
            process.communicate("\n")
    assert link.is_symlink()


def test_without_locks_a_folder_is_made_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    folder, remove = system.temporary_folder("test")
    os.utime(folder, (0, 0))
    remove_other = system.temporary_folder("test")[1]
    assert folder.exists()
    remove()
    remove_other()
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii"])
def test_a_console_without_unicode_gets_all_that_is_printed(family: Family, tmp_path: Path, encoding: str) -> None:
    """Names and tables have signs that these encodings lack; they are escaped, and nothing fails."""
    base = tmp_path / "b\u0101se-\u6a21\u578b"
    shutil.copytree(family.base, base)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "PYTHONIOENCODING": encoding,
        "PYTHONUTF8": "0",
        "OMP_NUM_THREADS": "1",
    }
    others = (["merge", "--help"], ["methods", "actmat"]) if encoding == "ascii" else ()  # it lacks the most signs
    for argv in (["inspect", str(base)], *others):
        command = [sys.executable, "-m", "actmat", *argv]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        shown = done.stdout.decode(encoding)
        assert "\\u6a21" in shown or argv[0] != "inspect"


def test_names_that_are_no_files_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [
        "C:model.safetensors",
        "x:stream",
        "NUL",
        "con.safetensors",
        "COM1",
        "lpt9.bin",
        "dot.",
        "blank ",
        "a?",
        "a\\b",
    ]
    good = ["model.safetensors", "console.bin", "nullable", "com10.bin", ".hidden", "a b"]
    assert all(is_plain_name(n) for n in (*bad[:-1], *good)), "all but a backslash are names on Linux"
    monkeypatch.setattr(system, "WINDOWS", True)
    assert [n for n in (*bad, *good) if is_plain_name(n)] == good
    (problem,) = check_output_path(tmp_path / "aux.merged", overwrite=False, inputs={})
    assert "not a folder name on Windows" in problem
    assert check_output_path(tmp_path / "merged", overwrite=False, inputs={}) == []


def test_a_drive_is_no_scheme_and_a_backslash_is_no_name() -> None:
    assert not is_url("C://models/base")
    assert is_url("s3://bucket/base")
    assert split_name("C:\\runs\\lr=3\\model") == ("", "C:\\runs\\lr=3\\model")
    assert split_name("math=C:\\models\\math") == ("math", "C:\\models\\math")


def test_names_of_checkpoints_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actmat.extras.averaging.recipe.PurePath", PureWindowsPath)
    assert distinct_names(["run\\step-1\\model", "run\\step-2\\model\\"]) == ["step-1", "step-2"]
    assert distinct_names(["s3://b/step-1/m", "s3://b/step-2/m"]) == ["step-1", "step-2"]


@pytest.mark.parametrize("below", ["", "inner"])
def test_an_input_by_a_name_in_other_case_is_no_output(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """A link stands for the second name that a folder has where case does not count; `realpath` keeps both there."""
    shutil.copytree(family.base, tmp_path / "base")
    (tmp_path / "BASE").symlink_to(tmp_path / "base")
    monkeypatch.setattr(os.path, "realpath", lambda path: str(path))
    monkeypatch.setattr(os.path, "islink", lambda path: False)
    problems = check_output_path(tmp_path / "BASE" / below, overwrite=True, inputs={"base": tmp_path / "base"})
    assert any("an input of this merge (base)" in p for p in problems), problems


@pytest.mark.parametrize("refusals", [2, 99])
def test_a_rename_waits_for_other_programs_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    replace, tried = os.replace, []

    def busy(source: Path, target: Path) -> None:
        tried.append(source)
        if len(tried) <= refusals:
            raise PermissionError(13, "used by another process")
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(system, "BUSY_WAITS", (0.0, 0.0, 0.0))
    (tmp_path / "a").touch()
    with pytest.raises(PermissionError):
        system.replace_file(tmp_path / "a", tmp_path / "b")
    assert len(tried) == 1, "only Windows waits"
    tried.clear()
    monkeypatch.setattr(system, "WINDOWS", True)
    if refusals == 99:
        with pytest.raises(PermissionError):
            system.replace_file(tmp_path / "a", tmp_path / "b")
        assert len(tried) == 4
    else:
        system.replace_file(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").exists()


def test_a_folder_that_is_not_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: int) -> Any:
        def fail(handle: int) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    for code in (errno.EINVAL, errno.EPERM, errno.EACCES):
        monkeypatch.setattr(os, "fsync", refused(code))
        system.sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", refused(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        system.sync_directory(tmp_path)


def test_macos_empties_the_cache_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    calls = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda handle, what: asked.append((handle, what)))
    monkeypatch.setitem(sys.modules, "fcntl", calls)
    monkeypatch.setattr(os, "fsync", lambda handle: asked.append((handle, 0)))
    system.sync_file(7)

    def unsupported(handle: int, what: int) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    calls.fcntl = unsupported
    system.sync_file(8)
    assert asked == [(7, 51), (8, 0)]


def test_a_manifest_of_two_drives_has_no_relative_path(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    relpath, out = os.path.relpath, family.base.parent / "two-drives"

    def other_drive(path: str, start: Any = ".") -> str:
        if Path(path).is_relative_to(start):
            return relpath(path, start)
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(os.path, "relpath", other_drive)
    actmat(family.argv("--out", str(out)), code=0)
    text = (out / "actmat_manifest.json").read_text(encoding="utf-8")
    assert "from_here" not in text
    actmat(["verify", out], code=0)
