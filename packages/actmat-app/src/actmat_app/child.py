"""Run one job in a separate process: a JSON object on stdin, lines of JSON on stdout.

A separate process can be stopped like a command, and has its own memory and, for visitors, its own cache and token.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from actmat.progress import NoProgress, tensors_to_do

if TYPE_CHECKING:
    from actmat.planning import MergePlan

INTERVAL_S = 0.2
"""Minimum seconds between two progress lines."""

Tell = Callable[..., None]
Job = Mapping[str, Any]


class Told(NoProgress):
    """Reports the progress of a merge; implements `actmat.progress.Progress`."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._done, self._total, self._last = 0, 1, 0.0

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Report the amount of work."""
        self._total, self._done = tensors_to_do(plans, resumed)
        self.count(self._done, self._total)

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor."""
        with self._lock:
            self._done += 1
            self.count(self._done, self._total)

    def count(self, done: int, total: int) -> None:
        """Report the number of finished tensors at intervals."""
        if time.monotonic() - self._last >= INTERVAL_S or done == total:
            self._last = time.monotonic()
            self._tell("progress", done=done, total=total)


def _fields(job: Job) -> Mapping[str, Any]:
    """Arguments of a merge, checked against the limits."""
    import actmat
    from actmat_app.limits import Limits

    if job["limits"] is None:
        return dict(job["fields"])
    limits = Limits(**job["limits"])
    fields = limits.pinned(job["fields"])
    limits.check_plan(actmat.plan(**fields))
    return fields


def _plan(job: Job, tell: Tell) -> None:
    import actmat
    from actmat.api.merging import INPUT_FIELDS
    from actmat_app.view import lines_html, plan_html

    fields = {name: value for name, value in _fields(job).items() if name not in INPUT_FIELDS}
    if (data := fields.pop("data", None)) is None:
        return tell("done", html=plan_html(actmat.plan(**fields)))
    from actmat.extras.tune.sources import InputSettings
    from actmat.extras.tune.with_inputs import plan_inputs
    from actmat.recipe.arguments import make_arguments

    recipe, _ = make_arguments(fields.pop("base"), fields.pop("experts"), fields)
    return tell("done", html=lines_html(plan_inputs(recipe, data, {}, InputSettings())))


def _merge(job: Job, tell: Tell) -> None:
    import actmat
    from actmat_app.view import merged_html

    measured = not job["out"].endswith(".safetensors")  # a single file holds no report
    report = actmat.merge(**{"diagnose": measured, **_fields(job), "out": job["out"]}, progress=Told(tell))
    page = Path(report.out) / "report.html"
    tell("done", html=merged_html(report), out=str(report.out), page=str(page) if page.is_file() else "")


def _compare(job: Job, tell: Tell) -> None:
    from actmat.extras.pages.comparison import compare
    from actmat_app.view import compared_html

    found = compare(job["first"], job["second"], progress=Told(tell).count)
    tell("done", html=compared_html(found))


def _push(job: Job, tell: Tell) -> None:
    import actmat
    from actmat_app.view import pushed_html

    tell("done", html=pushed_html(actmat.push(job["out"], job["repo"], public=job["public"])))


JOBS = {"plan": _plan, "merge": _merge, "compare": _compare, "push": _push}


def main() -> None:
    """Run the job from stdin; SIGTERM stops it, and a merge keeps its finished tensors."""
    signal.signal(signal.SIGTERM, _stop)
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # keep prints of libraries out of the protocol
    job = json.load(sys.stdin.buffer)
    if token := job.pop("token", ""):
        os.environ["HF_TOKEN"] = token  # for this process only
    elif job["limits"] is not None:
        os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"

    def tell(event: str, **fields: Any) -> None:
        text = json.dumps({"event": event, **fields})
        lines.write((text.replace(token, "***") if token else text) + "\n")

    from actmat.errors import MergeError, memory_errors

    try:
        with memory_errors():
            JOBS[job["do"]](job, tell)
    except MergeError as error:
        tell("failed", headline=error.headline, problems=[*error.problems, *getattr(error, "__notes__", ())])
    except KeyboardInterrupt as stop:
        tell("failed", headline="Stopped.", problems=getattr(stop, "__notes__", ()))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
