"""Run the jobs of the page, one at a time, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from typing import IO, Any

from actmat.errors import MergeError, OutputError
from actmat_app.view import progress_html

COMMAND = [sys.executable, "-P", "-m", "actmat_app.child"]

KILLED = -9
"""Exit code after SIGKILL, which Windows does not have."""

LAST_BYTES = 4000
"""Bytes of stderr kept from a failed job."""

PATIENCE_S = 10.0
"""Seconds that a job has to stop, in which it finishes its current tensors."""

Events = Generator[dict[str, Any], None, None]


class Jobs:
    """Runs jobs of the user of this machine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self, job: Mapping[str, Any]) -> Events:
        """Run a job of `child.JOBS` and yield its events; the last one is `done`.

        Raises:
            MergeError: the job's error, or the job was stopped or failed, or another one is running.
        """
        if self._process is not None:
            raise OutputError("Another job is running. Fix: wait for it, or stop it.")
        self._is_stopped = False
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            assert process.stdin is not None
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            self._process = process
            stack.callback(self._end, process)
            yield {"event": "progress", "html": progress_html("starting")}
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # the process ended, see below
                pipe.write(json.dumps(job).encode())
            for line in process.stdout:
                event = json.loads(line) if line.endswith(b"\n") else {"event": "cut"}
                if event["event"] == "failed":
                    raise MergeError(event["headline"], event["problems"])
                if event["event"] == "done":
                    break
                yield event
            else:
                code = process.wait()
                if self._is_stopped:  # before it could report
                    raise MergeError("Stopped.")
                raise _ended(code, job, errors)
        yield event

    def stop(self) -> None:
        """Stop the running job; a merge keeps its finished tensors and can be continued."""
        if self._process is not None:
            self._is_stopped = True
            self._process.terminate()

    def close(self) -> None:
        """Stop the running job and wait for its end."""
        if self._process is not None:
            self._process.terminate()
            self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a process to end; stop it if it hangs or its page was closed."""
        for stop in (process.terminate, process.kill, lambda: None):
            try:
                process.wait(PATIENCE_S)
                break
            except subprocess.TimeoutExpired:
                stop()
        self._process = None


def _ended(code: int, job: Mapping[str, Any], errors: IO[bytes]) -> MergeError:
    """The error for a process that ended without a result; its stderr is copied to the server's."""
    errors.seek(0)
    text, token = errors.read()[-LAST_BYTES:].decode("utf-8", "replace"), job.get("token")
    sys.stderr.write(text.replace(token, "***") if token else text)
    cause = " Likely cause: too little memory." if code == KILLED else ""
    return MergeError(f"The {job['do']} failed (exit code {code}); see the server's log.{cause}")
