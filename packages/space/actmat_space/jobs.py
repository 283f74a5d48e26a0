"""Jobs one at a time, each in a process and a folder of its own; merged adapters are kept for a while."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import MergeError, OutputError, RecipeError
from actmat_space.asking import ADDRESS, Form
from actmat_space.limits import Limits

COMMAND = [sys.executable, "-P", "-m", "actmat_space.child"]
PASSED = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "HF_ENDPOINT", "HF_HUB_DISABLE_XET", "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy",
    "OMP_NUM_THREADS", "OPENBLAS_CORETYPE",
)  # fmt: skip
"""Variables of the environment that a job sees: none of the secrets of the space, such as its own token."""
LAST_BYTES = 4000
"""Bytes kept of what a job that broke down says on stderr."""
END_S = 5.0
"""Time that a process has to end after it closed its output."""
OUT = "merged-adapter"
"""Name of an output: relative, since reports and manifests show it."""
RESULT = re.compile("[0-9a-f]{32}")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge that is done: the key under which it is kept, what to show of it, and its files."""

    key: str
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    report: Path
    archive: Path


class Jobs:
    """Runs jobs, and keeps what they made.

    Args:
        limits: of jobs.
        root: folder for the files of jobs; default: a new one among the temporary files of the system.
    """

    def __init__(self, limits: Limits, root: Path | None = None) -> None:
        self.limits = limits
        self.root = Path(tempfile.mkdtemp(prefix="actmat-space-")) if root is None else root
        self._one = threading.Lock()
        self._kept = self.root / "merged"
        self._kept.mkdir(parents=True, exist_ok=True)

    def plan(self, form: Form) -> Mapping[str, Any]:
        """What a merge would do.

        Raises:
            MergeError: the adapters do not fit, are too large, or it took too long.
        """
        with self._one:
            plan: Mapping[str, Any] = self._run({"do": "plan", "form": dataclasses.asdict(form)})["plan"]
            return plan

    def merge(self, form: Form, progress: Progress | None = None) -> Merged:
        """Merge, and keep the output.

        Raises:
            MergeError: as for `plan`; nothing is kept then.
        """
        with self._one:
            self.sweep(room=1)
            key = secrets.token_hex(16)
            folder = self._kept / key
            out = folder / OUT
            folder.mkdir()
            try:
                job = {"do": "merge", "form": dataclasses.asdict(form), "out": OUT}
                said = self._run(job, progress, keep=out)
                archive = folder / f"{OUT}.zip"
                with zipfile.ZipFile(archive, "w") as file:  # weights do not shrink
                    for path in sorted(p for p in out.rglob("*") if p.is_file()):
                        file.write(path, Path(out.name) / path.relative_to(out))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return Merged(key, said["plan"], said["result"], out / "report.html", archive)

    def push(self, key: str, repo_id: str, token: str, *, public: bool = False) -> Mapping[str, Any]:
        """Send a kept output to a repository of the hub with the visitor's token, which only that process sees.

        Raises:
            MergeError: nothing is kept under the key, no token or repository is given, or the hub refuses.
        """
        repo_id, token = repo_id.strip().removeprefix("https://huggingface.co/"), token.strip()
        match = ADDRESS.fullmatch(repo_id)
        if match is None or match["revision"] or "/tree/" in repo_id:
            raise RecipeError(f"Expected the repository to push to as your-name/name, found '{repo_id[:200]}'.")
        if not token:
            raise RecipeError("No token was given. Fix: sign in, or paste a token that may write (Settings, Access "
                              "Tokens on the hub).")  # fmt: skip
        if not token.isascii() or not token.isprintable() or " " in token or len(token) > 4000:
            raise RecipeError("What was given as the token is none: a token has no spaces and no special characters.")
        with self._one:
            self.sweep()
            out = self._kept / key / OUT
            if not RESULT.fullmatch(key) or not out.is_dir():
                minutes = self.limits.keep_seconds // 60
                raise OutputError(f"There is no merged adapter to push: it is kept for {minutes} minutes at most. Fix: "
                                  "merge, then push.")  # fmt: skip
            return self._run(
                {"do": "push", "out": str(out), "repo_id": match["repo"], "token": token, "public": public}
            )

    def sweep(self, *, room: int = 0) -> None:
        """Remove outputs that were kept long enough, and the oldest above the limit, with room for so many more."""
        now = time.time()
        ages = sorted((now - p.stat().st_mtime, p) for p in self._kept.iterdir())
        for number, (age, path) in enumerate(ages):
            if age > self.limits.keep_seconds or number >= self.limits.keep - room:
                shutil.rmtree(path, ignore_errors=True)

    def sweep_forever(self, interval_s: float = 60.0) -> None:
        """Sweep in a thread of its own from now on."""

        def work() -> None:
            while True:
                time.sleep(interval_s)
                with self._one:
                    self.sweep()

        threading.Thread(target=work, daemon=True).start()

    def _run(
        self, job: Mapping[str, Any], progress: Progress | None = None, *, keep: Path | None = None
    ) -> Mapping[str, Any]:
        """The last thing that the process of a job says; its output moves to `keep`.

        Raises:
            MergeError: the one that it says; or it ended otherwise, or took too long.
        """
        work = Path(tempfile.mkdtemp(prefix="job-", dir=self.root))
        try:
            said = self._talk({**job, "limits": dataclasses.asdict(self.limits)}, work, progress)
            if keep is not None:
                (work / OUT).rename(keep)
            return said
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _talk(self, job: Mapping[str, Any], work: Path, progress: Progress | None) -> Mapping[str, Any]:
        errors = work / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=work,
                env=_environment(work), start_new_session=True,
            )  # fmt: skip
        late = threading.Event()
        timer = threading.Timer(self.limits.seconds, _stop, [process, late])
        timer.start()
        said: Mapping[str, Any] = {}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with process.stdin as pipe:
                    json.dump(job, pipe)
            except BrokenPipeError:
                pass  # it ended, which is told below
            with process.stdout as lines:
                for line in lines:
                    if not line.endswith("\n"):
                        break  # it was stopped while it spoke
                    said = json.loads(line)
                    if said["event"] == "progress" and progress is not None:
                        progress(said["done"], said["total"])
        finally:
            timer.cancel()
            try:
                code = process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:  # it hangs, or whoever waited for it has left
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        if said.get("event") == "done":
            return said
        if said.get("event") == "failed":
            raise MergeError(said["headline"], said["problems"])
        raise self._ended(job, code, late=late.is_set(), errors=errors)

    def _ended(self, job: Mapping[str, Any], code: int, *, late: bool, errors: Path) -> MergeError:
        """An error for a process that ended without a word."""
        if late:
            return MergeError(
                f"The {job['do']} was stopped after {self.limits.seconds} s, the limit of this space. Fix: fewer or "
                "smaller adapters, a faster method such as average, or a space of your own with a larger "
                "ACTMAT_SPACE_SECONDS."
            )
        text = errors.read_bytes()[-LAST_BYTES:].decode("utf-8", "replace")
        token = job.get("token")
        sys.stderr.write(text.replace(token, "***") if token else text)  # for the owner of the space
        if code == -signal.SIGKILL:
            return MergeError(f"The {job['do']} was ended by the system. Likely cause: too little memory. Fix: fewer "
                              "or smaller adapters.")  # fmt: skip
        return MergeError(f"The {job['do']} broke down (exit code {code}), which is a fault of this space; its log has "
                          "the details.")  # fmt: skip


def _stop(process: subprocess.Popen[str], late: threading.Event) -> None:
    """Kill a process with all that it started, and say so."""
    late.set()
    os.killpg(process.pid, signal.SIGKILL)


def _environment(work: Path) -> dict[str, str]:
    """Environment of a job: a cache of its own, and no token but the one that it is told."""
    found = {name: os.environ[name] for name in PASSED if name in os.environ}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return found | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HOME": str(work),
        "HF_HOME": str(work / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TMPDIR": str(work),
        "XDG_CACHE_HOME": str(work / "cache"),
    }
