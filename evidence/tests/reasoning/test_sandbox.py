"""Programs that try to get out: each is contained, leaves nothing behind, and has failed.

Every attempt is checked twice: by the verdict, and from outside by what it would have left.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actmat.errors import MergeError
from actmat_experiments.reasoning import sandbox
from actmat_experiments.reasoning.sandbox import Limits, run, run_program

QUICK = Limits(timeout_s=3.0, memory_b=512 << 20)
FOR_ONE_SECOND = Limits(timeout_s=1.0, memory_b=512 << 20)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fences are those of Linux")


def fenced(*names: str) -> pytest.MarkDecorator:
    """A test that needs fences which not every kernel gives."""
    missing = [n for n in names if sandbox.protections()[n]] if sys.platform == "linux" else list(names)
    return pytest.mark.skipif(bool(missing), reason=f"this kernel does not fence {', '.join(missing)}")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guard and its folders have a place of their own here: tests that run beside these have guards, too."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(run._GUARD.parent, place / "guard", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(run, "_GUARD", place / "guard" / "guard.py")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.glob("actmat-sandbox-*"))
    assert not processes(str(place))


def processes(word: str) -> list[str]:
    """Command lines of all processes of this machine that hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_a_right_program_passes() -> None:
    verdict = run_program("import collections, math, typing\nassert math.gcd(4, 6) == 2", QUICK)
    assert verdict.passed
    assert verdict.reason == "passed"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", "died"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died"),
        ("print('end ' + '0' * 32); raise ValueError", "ValueError"),
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (2 << 20))", "OSError"),
    ],
)
def test_a_wrong_program_fails(program: str, reason: str) -> None:
    verdict = run_program(program, QUICK)
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


def test_endless_recursion_fails() -> None:
    assert not run_program("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", FOR_ONE_SECOND).passed


def test_said_through_every_open_pipe_the_word_is_not_known() -> None:
    shout = (
        "import os\n"
        "for fd in range(64):\n"
        "  try: os.write(fd, b'\\nend ' + b'0' * 32 + b'\\n')\n"
        "  except OSError: pass\n"
        "os._exit(0)"
    )
    assert not run_program(shout, QUICK).passed


def test_deaf_to_signals_an_endless_loop_ends_in_time() -> None:
    deaf = (
        "import signal\n"
        "for s in range(1, 32):\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\n"
        "while True: pass"
    )
    began = time.monotonic()
    assert run_program(deaf, FOR_ONE_SECOND).reason == "timed out"
    assert time.monotonic() - began < 8


@fenced("user")
def test_a_fork_bomb_stays_small_and_dies() -> None:
    bomb = "import os\nmark = 'bomb-of-the-test'\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run_program(bomb, FOR_ONE_SECOND).reason == "timed out"
    count = "import os\nfor i in range(40):\n  if os.fork() == 0:\n    import time; time.sleep(60)"
    verdict = run_program(count, QUICK)
    assert verdict.reason.startswith("BlockingIOError")


@fenced("processes hidden")
def test_what_it_leaves_behind_in_a_session_of_its_own_dies_with_it() -> None:
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n"
        "    while True: open('alive', 'w').write('x'); time.sleep(0.01)\n"
        "  os._exit(0)\n"
        "time.sleep(0.2)"
    )
    before = len(processes(str(run._GUARD)))
    assert run_program(daemon, QUICK).passed
    assert len(processes(str(run._GUARD))) == before == 0


@fenced("processes hidden")
@pytest.mark.parametrize("whom", ["os.getppid()", "-1", str(os.getpid())], ids=["parent", "all", "tester"])
def test_it_cannot_signal_others(whom: str) -> None:
    verdict = run_program(f"import os, time\nos.kill({whom}, 9)\ntime.sleep(0.2)", QUICK)
    assert not verdict.passed
    assert verdict.reason.startswith(("PermissionError", "ProcessLookupError"))


@fenced("landlock")
def test_it_writes_in_its_own_folder_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for place in (tmp_path / "out", Path(tempfile.gettempdir()) / "actmat-escaped", Path.home() / "actmat-escaped"):
        verdict = run_program(f"open({str(place)!r}, 'w').write('out')", QUICK)
        assert verdict.reason.startswith(("PermissionError", "OSError")), verdict
        assert not place.exists()
    inside = (
        "open('a', 'w').write('x')\nimport os; os.mkdir('d'); os.rename('a', 'd/a')\nassert open('d/a').read() == 'x'"
    )
    assert run_program(inside, QUICK).passed


@fenced("landlock")
def test_it_removes_and_changes_nothing_outside(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    for attempt in ("os.remove(p)", "os.truncate(p, 0)", "os.rename(p, 'taken')", "os.symlink(p, 'l'); open('l', 'a')"):
        assert not run_program(f"import os\np = {str(kept)!r}\n{attempt}", QUICK).passed
    assert kept.read_text() == "mine"


@fenced("landlock")
def test_it_reads_no_files_but_those_of_python(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("word")
    secret.chmod(0o644)
    for path in (secret, Path("/etc/passwd"), Path(f"/proc/{os.getpid()}/environ")):
        assert run_program(f"open({str(path)!r}).read()", QUICK).reason.startswith("PermissionError")


@fenced("scratch limited")
def test_many_files_do_not_fill_the_disk() -> None:
    many = "for i in range(64): open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert run_program(many, QUICK).reason.startswith("OSError: [Errno 28]")
    names = "for i in range(10_000): open(str(i), 'w').close()"
    assert run_program(names, QUICK).reason.startswith("OSError: [Errno 28]")


@fenced("network")
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert run_program(connect, QUICK).reason.startswith(("PermissionError", "OSError"))
        with pytest.raises(TimeoutError):
            server.accept()
    send = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
    assert run_program(send, QUICK).reason.startswith("OSError")


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_WORD", "told")
    look = "import os\nassert 'SECRET_WORD' not in os.environ\nassert os.listdir('.') == []\nassert input"
    assert run_program(look, QUICK).passed


@fenced("user")
def test_it_gains_no_rights() -> None:
    rise = "import ctypes, os\nassert os.getuid() != 0\nassert ctypes.CDLL(None).setuid(0) == -1"
    verdict = run_program(rise, QUICK)
    assert verdict.passed or (os.getuid() == 0 and "setuid" not in verdict.reason), verdict


def test_limits_are_those_that_were_given() -> None:
    look = (
        "import resource as r\n"
        "assert r.getrlimit(r.RLIMIT_AS) == (512 << 20, 512 << 20)\n"
        "assert r.getrlimit(r.RLIMIT_NPROC) == (8, 8)\n"
        "assert r.getrlimit(r.RLIMIT_FSIZE) == (1 << 20, 1 << 20)\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (64, 64)\n"
        "assert r.getrlimit(r.RLIMIT_CORE) == (0, 0)\n"
        "assert r.getrlimit(r.RLIMIT_CPU) == (4, 4)\n"
    )
    assert run_program(look, QUICK).reason == "passed"


def test_the_guard_itself_may_be_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A guard that never answers, and one that dies, are failures of the program."""
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(run, "_GUARD", silent)
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    assert run_program("pass", Limits(timeout_s=0.3)).reason.startswith("timed out")
    silent.write_text("import os; os._exit(1)")
    monkeypatch.setattr(run, "_GRACE_S", 10.0)
    assert run_program("pass", Limits(timeout_s=0.3)).reason.startswith("died")


@pytest.fixture
def without_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The guard on a kernel that allows no namespaces and has no landlock."""
    folder = tmp_path / "guard"
    shutil.copytree(run._GUARD.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    fences = folder / "fences.py"
    refuse = "\n\ndef {}(*_):\n    raise OSError(1, 'not allowed here')\n"
    fences.write_text(fences.read_text() + "".join(refuse.format(n) for n in ("new_namespaces", "landlock")))
    monkeypatch.setattr(run, "_GUARD", folder / "guard.py")
    sandbox.protections.cache_clear()
    yield
    sandbox.protections.cache_clear()


@pytest.mark.usefixtures("without_namespaces")
def test_a_kernel_without_fences_is_told_and_code_is_refused() -> None:
    found = sandbox.protections()
    assert found["limits"] == ""
    assert "not allowed here" in found["network"]
    assert "not allowed here" in found["landlock"]
    with pytest.raises(MergeError) as caught:
        sandbox.require_protections()
    assert len(caught.value.problems) == 3
    assert any("network" in p for p in caught.value.problems)
    assert any("files" in p for p in caught.value.problems)


@pytest.mark.usefixtures("without_namespaces")
def test_without_namespaces_what_is_left_behind_is_killed_by_the_guard() -> None:
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0: time.sleep(60)\n"
        "  os._exit(0)\n"
        "time.sleep(0.1)"
    )
    verdict = run_program(daemon, QUICK)
    assert verdict.passed
    assert verdict.refused["namespaces"]
    assert not processes(str(run._GUARD))
