"""The script between the evaluation and a program: `python guard.py < job.json > verdict.json`.

    evaluation -> guard -> first process of the program's own namespaces -> program

The guard reads the whole job, makes fences, starts the program as a fork of itself and waits until it ends or its time
is over. Then everything that the program has started is killed. The program passes if it comes to its end, which it
proves by a word that was drawn at random before it started: leaving early by `os._exit(0)` does not pass.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fences  # type: ignore[import-not-found]  # a neighbor, as a script

_SAID_B = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOBODY = 65534


def main() -> None:
    """Read the job, run it, write the verdict."""
    job = json.load(sys.stdin.buffer)
    word = secrets.token_hex(16)
    fences._LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come here, where they are killed
    enforced, refused = [], {}
    try:
        fences.new_namespaces()
        enforced += ["network", "processes hidden"]
    except OSError as error:
        refused["namespaces"] = str(error)
    listen, say = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(listen)
        _first(job, word, say, isolated="network" in enforced)
    os.close(say)
    said, late = _listen(listen, child, started + job["timeout_s"])
    _end(child)
    lines = said.decode(errors="replace").split("\n")
    for line in lines:
        if line.startswith("fence "):
            enforced.append(line.removeprefix("fence "))
        elif line.startswith("no fence "):
            name, _, why = line.removeprefix("no fence ").partition(": ")
            refused[name] = why
    passed = f"end {word}" in lines and not late
    wrong = [line.removeprefix("wrong ") for line in lines if line.startswith(f"wrong {word} ")]
    reason = "passed" if passed else "timed out" if late else wrong[-1][len(word) + 1 :] if wrong else "died"
    json.dump({"passed": passed, "reason": reason, "enforced": enforced, "refused": refused}, sys.stdout)


def _listen(pipe: int, child: int, deadline: float) -> tuple[bytes, bool]:
    """The child's output until it ends or its time is over; True if the time was over."""
    said, watch = b"", os.pidfd_open(child)
    sources = [watch, pipe]
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(sources, [], [], left)
        if pipe in ready:
            piece = os.read(pipe, 4096)
            said = (said + piece)[:_SAID_B]
            if not piece:
                sources.remove(pipe)
        elif watch in ready:
            return said, False
    return said, True


def _end(child: int) -> None:
    """Kill the child and all that it has left; with a namespace of processes the kernel does the second."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while orphans := _children():
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _first(job: dict[str, Any], word: str, say: int, *, isolated: bool) -> None:
    """The first process of the namespaces: starts the program, outlives it by nothing. Never returns."""
    fences._LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if isolated:
        for name, fence in (
            ("files read-only", fences.read_only_everywhere),
            ("scratch limited", lambda: fences.private_scratch(job["scratch"], job["scratch_b"], job["n_files"])),
        ):
            _try(say, name, fence)
    program = os.fork()
    if program == 0:
        try:
            _program(job, word, say)
        finally:
            os._exit(1)
    while True:
        pid, _ = os.wait()
        if pid == program:
            os._exit(0)


def _try(say: int, name: str, fence: Any) -> bool:
    try:
        fence()
    except OSError as error:
        os.write(say, f"no fence {name}: {error}\n".encode())
        return False
    os.write(say, f"fence {name}\n".encode())
    return True


def _program(job: dict[str, Any], word: str, say: int) -> None:
    """Stand inside all fences and run the text of the job."""
    os.setsid()
    os.chdir(job["scratch"])
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    if os.geteuid() == 0:
        if not os.path.ismount("."):
            os.chown(".", job["uid"], job["uid"])
        _try(say, "user", lambda: _give_up_rights(job["uid"]))
    else:
        os.write(say, b"fence user\n")
    for kind, most in (
        (resource.RLIMIT_CPU, int(job["timeout_s"]) + 1),
        (resource.RLIMIT_AS, job["memory_b"]),
        (resource.RLIMIT_FSIZE, job["file_b"]),
        (resource.RLIMIT_NOFILE, job["open_files"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    os.write(say, b"fence limits\n")
    _try(say, "landlock", lambda: fences.landlock(job["readable"], [job["scratch"], os.devnull]))
    try:
        code = compile(job.pop("program"), "<program>", "exec")
        exec(code, {"__name__": "__main__"})  # the purpose of this process
    except BaseException as error:  # noqa: BLE001  # whatever ends it is its verdict
        text = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
        os.write(say, f"wrong {word} {text}\n".encode())
        return
    os.write(say, f"\nend {word}\n".encode())


def _give_up_rights(uid: int) -> None:
    try:
        fences.give_up_rights(uid)
    except OSError:  # a container that maps few numbers
        fences.give_up_rights(_NOBODY)


if __name__ == "__main__":
    main()
