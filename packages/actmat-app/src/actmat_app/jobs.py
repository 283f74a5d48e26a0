"""Run jobs in separate processes, those of visitors in separate folders; outputs are kept for a limited time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

from actmat.errors import MergeError, OutputError, RecipeError
from actmat.system import temporary_folder
from actmat_app.limits import Limits, repository_of
from actmat_app.view import progress_html

COMMAND = [sys.executable, "-P", "-m", "actmat_app.child"]
PASSED = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "HF_ENDPOINT",
    "HF_HUB_DISABLE_XET", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY",
    "http_proxy", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""Environment variables passed to a visitor's job; excludes secrets of the server, such as its token."""

KILLED = -9
"""Exit code after SIGKILL, which Windows does not have."""

LAST_BYTES = 4000
"""Bytes of stderr kept from a failed job."""

PATIENCE_S = 10.0
"""Seconds that a job has to stop, in which it finishes its current tensors."""

OUT = "merged"
"""Name of a visitor's output; relative, because reports and manifests show it."""

Events = Generator[dict[str, Any], None, None]


class Jobs:
    """Runs jobs and stores the outputs of visitors.

    Args:
        limits: limits of visitors' jobs; None for local use.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits
        self.root, self._remove = temporary_folder("app")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()

    def run(self, user: str, job: Mapping[str, Any], keep: Path | None = None) -> Events:
        """Run a job of `child.JOBS` and yield its events; the last one is `done`.

        Args:
            user: id of the user; each user runs one job at a time.
            job: the job; a visitor's job runs in a temporary folder.
            keep: destination of the output in that folder.

        Raises:
            MergeError: the job's error, or the job was stopped, failed, or took too long.
        """
        if user in self._running:
            raise OutputError("Another job is running. Fix: wait for it, or stop it.")
        limits, late = self.limits, threading.Event()
        self._stopped.discard(user)
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.root, ignore_cleanup_errors=True)))
            errors = stack.enter_context((work / "stderr").open("w+b"))
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                cwd=None if limits is None else work, env=None if limits is None else _environment(work),
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            stack.callback(_end, process)
            self._running[user] = process
            stack.callback(self._running.pop, user)
            if limits is not None:
                timer = threading.Timer(limits.seconds, _kill, [process, late])
                timer.start()
                stack.callback(timer.cancel)
            yield {"event": "progress", "html": progress_html("starting")}
            message = {**job, "limits": None if limits is None else dataclasses.asdict(limits)}
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # the process ended, see below
                pipe.write(json.dumps(message).encode())
            for line in process.stdout:
                event = json.loads(line) if line.endswith(b"\n") else {"event": "cut"}
                if event["event"] == "failed":
                    raise MergeError(event["headline"], event["problems"])
                if event["event"] == "done":
                    if keep is not None:
                        (work / OUT).rename(keep)
                    break
                yield event
            else:
                code = process.wait()
                if user in self._stopped:  # before it could report
                    raise MergeError("Stopped.")
                raise _ended(code, job, errors, limits if late.is_set() else None)
        yield event

    def merge(self, user: str, fields: Mapping[str, Any], out: str) -> Events:
        """Yield the events of a merge; the last one has the folder `out` and, for a visitor, the file `archive`."""
        if self.limits is None:
            yield from self.run(user, {"do": "merge", "fields": fields, "out": out})
            return
        for folder in self._kept()[self.limits.keep - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="kept-", dir=self.root))
        made, archive = folder / OUT, folder / f"{OUT}.zip"
        for event in self.run(user, {"do": "merge", "fields": fields, "out": OUT}, made):
            if event["event"] != "done":
                yield event
                continue
            with zipfile.ZipFile(archive, "w") as file:  # uncompressed: weights do not shrink
                for path in sorted(p for p in made.rglob("*") if p.is_file()):
                    file.write(path, Path(OUT) / path.relative_to(made))
            yield {**event, "out": str(made), "page": str(made / "report.html"), "archive": str(archive)}

    def _kept(self) -> list[Path]:
        """Folders of visitors' outputs, newest first."""
        return sorted(self.root.glob("kept-*"), key=lambda p: p.stat().st_mtime, reverse=True)

    def push(self, user: str, out: str, repo: str, token: str, *, public: bool) -> Events:
        """Yield the events of a push; only the push's process receives the token.

        Raises:
            MergeError: output, repository or token is missing, or the hub refuses.
        """
        (name, revision), token = repository_of(repo), token.strip()
        if revision:
            raise RecipeError(f"Expected the repository to push to as your-name/name, found '{repo[:200]}'.")
        if not out or (self.limits is not None and not os.path.isdir(out)):
            raise OutputError("No merged model to push; a served page keeps them for a limited time. Fix: merge first.")
        if (self.limits is not None and not token) or re.search(r"[^!-~]", token) or len(token) > 4000:
            raise RecipeError("No valid token given. Fix: sign in, or paste a token that may write, without spaces.")
        return self.run(user, {"do": "push", "out": out, "repo": name, "token": token, "public": public})

    def stop(self, user: str) -> None:
        """Stop the running job of a user; a merge keeps its finished tensors and can be continued."""
        if process := self._running.get(user):
            self._stopped.add(user)
            process.terminate()

    def close(self) -> None:
        """Stop all jobs, wait for them to end, and remove stored outputs."""
        for process in list(self._running.values()):
            process.terminate()
            _end(process)
        self._remove()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end; stop it if it hangs or its page was closed."""
    for stop in (process.terminate, process.kill, lambda: None):
        try:
            process.wait(PATIENCE_S)
            return
        except subprocess.TimeoutExpired:
            stop()


def _kill(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    os.killpg(process.pid, signal.SIGKILL)


def _ended(code: int, job: Mapping[str, Any], errors: IO[bytes], late: Limits | None) -> MergeError:
    """The error for a process that ended without a result; its stderr is copied to the server's."""
    if late is not None:
        return MergeError(
            f"The {job['do']} was stopped after {late.seconds} s, the limit of this page. Fix: smaller inputs, a "
            "faster method such as average, or a page of your own."
        )
    errors.seek(0)
    text, token = errors.read()[-LAST_BYTES:].decode("utf-8", "replace"), job.get("token")
    sys.stderr.write(text.replace(token, "***") if token else text)
    cause = " Likely cause: too little memory." if code == KILLED else ""
    return MergeError(f"The {job['do']} failed (exit code {code}); see the server's log.{cause}")


def _environment(work: Path) -> dict[str, str]:
    """Environment of a visitor's job: a separate cache, no secrets."""
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    own = {"HOME": work, "HF_HOME": work / "hub", "XDG_CACHE_HOME": work / "cache", "TMPDIR": work}
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return passed | quiet | {name: str(place) for name, place in own.items()}
