"""Jobs of the page: merges, diagnoses and comparisons, one at a time, each in a process of its own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmat.errors import OutputError

COMMAND = [sys.executable, "-m", "actmat.extras.ui.child"]
PATIENCE_S = 20.0
"""Time that a job has to stop: it finishes the tensors that it is at."""

LAST = 4000
"""Characters kept of what a job says on stderr."""


class Jobs:
    """The running job, and what became of those before it.

    Args:
        folder: where pages of diagnoses and comparisons go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[str] | None = None
        self._state: dict[str, Any] = {"id": 0, "state": "idle"}
        self._pages: dict[int, Path] = {}

    def start(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Start a job: `do` is merge, diagnose or compare.

        Raises:
            OutputError: another one is running.
        """
        with self._lock:
            if self._state["state"] == "running":
                raise OutputError("Another job is running: wait for it, or stop it.")
            number = next(self._numbers)
            self._state = {"id": number, "state": "running", "do": job["do"], "done": 0, "total": None, "notes": []}
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="backslashreplace",
                start_new_session=True,  # Ctrl-C on the server stops it through `close`
            )
        said: list[str] = []
        errors = threading.Thread(target=self._listen, args=(self._process, said), daemon=True)
        errors.start()
        threading.Thread(target=self._follow, args=(self._process, number, errors, said), daemon=True).start()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                json.dump({**job, "page": str(self._folder / f"{number}.html")}, pipe)
        except BrokenPipeError:
            pass  # it ended: `_follow` says so
        return self.state()

    def state(self) -> dict[str, Any]:
        """The running job, or the last one: `state` is idle, running, done, failed or stopped."""
        with self._lock:
            return dict(self._state)

    def page(self, number: int) -> Path | None:
        """The page that a job made."""
        with self._lock:
            return self._pages.get(number)

    def stop(self) -> dict[str, Any]:
        """Ask the running job to stop; a merge keeps what is done for the same merge later."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                self._state["stopping"] = True
        return self.state()

    def close(self) -> None:
        """Stop the running job and wait for its end."""
        self.stop()
        if self._process is not None:
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # what it has finished is on the disk
                self._process.wait()

    def _listen(self, process: subprocess.Popen[str], said: list[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said[:] = ["".join([*said, line])[-LAST:]]

    def _follow(self, process: subprocess.Popen[str], number: int, errors: threading.Thread, said: list[str]) -> None:
        """Read the job's lines until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                self._take(number, json.loads(line))
        code = process.wait()
        errors.join(PATIENCE_S)
        with self._lock:
            if self._state["id"] != number or self._state["state"] != "running":
                return  # it said how it ended, and the next one may have begun
            if self._state.get("stopping"):
                self._state["state"] = "stopped"  # before it had begun to merge
                return
            self._state |= {
                "state": "failed",
                "headline": f"The job ended with code {code} and said no reason. What is finished is kept.",
                "problems": "".join(said).strip().splitlines()[-8:],
            }

    def _take(self, number: int, line: dict[str, Any]) -> None:
        event = line.pop("event")
        if event == "note":
            self._state["notes"] = [*self._state["notes"], line["text"]]
            return
        if event in ("done", "failed", "stopped"):
            page = line.pop("page", None)
            if page:
                self._pages[number] = Path(page)
                line["page"] = f"/pages/{number}"
            self._state |= {"state": event, **line, "notes": [*self._state["notes"], *line.get("notes", [])]}
        else:
            self._state |= line | {"doing": "flushing to disk" if event == "finishing" else "working"}
