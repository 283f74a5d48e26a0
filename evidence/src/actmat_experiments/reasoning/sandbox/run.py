"""Start a program behind the guard, and report the guard's abilities on this machine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actmat.errors import MergeError

_GUARD = Path(__file__).with_name("guard.py")
_GRACE_S = 10.0
_FIRST_UID = 1 << 30
"""Above the numbers of users and of containers' users."""
_COUNTER = itertools.cycle(range(1 << 10))
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
_FENCES = ("network", "processes hidden", "landlock", "user", "limits", "scratch limited", "files read-only")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Args:
        timeout_s: wall time, and processor time of each of its processes.
        memory_b: address space of each process.
        file_b: size of each file.
        scratch_b: all its files together, where a private file system can be made.
        n_files: number of its files, likewise.
        open_files: at the same time, per process.
        processes: processes and threads at the same time, itself among them.
    """

    timeout_s: float = 10.0
    memory_b: int = 2 << 30
    file_b: int = 1 << 20
    scratch_b: int = 16 << 20
    n_files: int = 256
    open_files: int = 64
    processes: int = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a program.

    Args:
        passed: it came to its end without an error, in time.
        reason: "passed", "timed out", "died", or the error that ended it.
        enforced: fences that stood.
        refused: fence -> why the kernel would not make it.
    """

    passed: bool
    reason: str
    enforced: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def run_program(program: str, limits: Limits = Limits()) -> Verdict:  # frozen
    """Run Python text to its end in a process of its own; nothing of it is left behind.

    Its environment is scrubbed, its standard streams are closed off, its folder is empty and private. Whatever it
    does, the result is a verdict: a program that hangs, dies, or exceeds a limit has failed.

    Args:
        program: source text.
        limits: of its resources.
    """
    with tempfile.TemporaryDirectory(prefix="actmat-sandbox-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o711)
        job = asdict(limits) | {
            "program": program,
            "scratch": scratch,
            "readable": _readable(),
            "uid": _FIRST_UID + (os.getpid() % (1 << 16) << 10) + next(_COUNTER),
        }
        guard = subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=_environment(scratch),
            start_new_session=True,
            close_fds=True,
        )
        try:
            said, _ = guard.communicate(json.dumps(job).encode(), timeout=limits.timeout_s + _GRACE_S)
            found: dict[str, Any] = json.loads(said)
            return Verdict(found["passed"], found["reason"], tuple(found["enforced"]), found["refused"])
        except subprocess.TimeoutExpired:
            return Verdict(False, "timed out: even the guard did not answer")
        except ValueError:
            return Verdict(False, "died: the guard was killed with it")
        finally:
            _kill_group(guard)


def _kill_group(guard: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guard.pid, signal.SIGKILL)
    guard.communicate()


@functools.cache
def _readable() -> list[str]:
    """Folders that a Python program reads: the interpreter, its libraries, the system's."""
    python = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *site.getsitepackages()]
    return sorted({*python, *_READABLE})


def _environment(scratch: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    places = {"HOME": scratch, "TMPDIR": scratch, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return {**places, **threads, "PYTHONHASHSEED": "0"}


@functools.cache
def protections() -> Mapping[str, str]:
    """Fence -> "" where it stands on this machine, or why it does not; found by running an empty program."""
    verdict = run_program("pass")
    missing: dict[str, Any] = {name: verdict.refused.get(name, "the guard could not run") for name in _FENCES}
    if "namespaces" in verdict.refused:
        for name in ("network", "processes hidden", "scratch limited", "files read-only"):
            missing[name] = verdict.refused["namespaces"]
    return {name: "" if name in verdict.enforced else missing[name] for name in _FENCES}


def require_protections() -> None:
    """Refuse to run a model's code where network, files or processes stay open to it.

    Raises:
        MergeError: names every fence that is missing, and why.
    """
    found = protections()
    files = found["landlock"] and found["files read-only"]
    problems = [f"{name}: {found[name]}" for name in ("network", "processes hidden", "user", "limits") if found[name]]
    problems += [f"files: {files}"] if files else []
    if problems:
        raise MergeError(
            "Code written by a model is run here only where the kernel can fence it in. This machine lacks some of "
            "that; evaluate in a container or virtual machine that allows user namespaces, or leave these "
            "benchmarks out with --tasks.",
            problems,
        )
