"""Run one job in a separate process: a JSON object on stdin, lines of JSON on stdout.

A separate process can be stopped like a command, and has its own memory and, for visitors, its own cache and token.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from actmat.progress import Progress
from actmat_app.form import SUFFIX

if TYPE_CHECKING:
    from actmat.extras.serving import Serving

INTERVAL_S = 0.5
"""Seconds between two lines about an unchanged stage."""

Tell = Callable[..., None]
Job = Mapping[str, Any]
Result = dict[str, Any]


class Stages(Progress):
    """Reports the stage of a job: when it begins, and then at intervals."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._began = tell, time.monotonic()
        self._stage, self._parts, self._total, self._stage_began = "", 0, 0, self._began

    def doing(self, what: str, total: int = 0) -> None:
        """Report a stage of so many parts."""
        self._stage, self._parts, self._total, self._stage_began = what, 0, total, time.monotonic()
        self.report()

    def done(self, parts: int) -> None:
        """Note the parts that are done, for the next report."""
        self._parts = parts

    def report(self) -> None:
        """Report the stage, the seconds since the job began, and, where it can be said, those left of the stage."""
        from actmat_app.view import progress_html

        each = (time.monotonic() - self._stage_began) / self._parts if self._parts else None
        left = None if each is None else each * (self._total - self._parts)
        self._tell("progress", html=progress_html(self._stage, self._parts, self._total, left, self.spent))

    @property
    def spent(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def regularly(self) -> Iterator[None]:
        """Report at intervals until the block ends."""
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(INTERVAL_S):
                self.report()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


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


def _plan(job: Job, stages: Stages) -> Result:
    import actmat
    from actmat.api.merging import INPUT_FIELDS
    from actmat.errors import RecipeError
    from actmat.report.words import are_image_files
    from actmat_app.view import lines_html, plan_html

    fields = {name: value for name, value in _fields(job).items() if name not in INPUT_FIELDS}
    data = fields.pop("data", None)
    plan = actmat.plan(**fields)
    if job["out"].endswith(SUFFIX) and not are_image_files(i.location for i in plan.inputs):
        raise RecipeError("One file is made of files of image models. Fix: another kind of output, which is a folder.")
    if data is None:
        return {"html": plan_html(plan)}
    from actmat.extras.tune.sources import InputSettings
    from actmat.extras.tune.with_inputs import plan_inputs
    from actmat.recipe.arguments import make_arguments

    recipe, run = make_arguments(fields.pop("base"), fields.pop("experts"), fields)
    return {"html": lines_html(plan_inputs(recipe, data, {}, InputSettings(), run))}


def _merge(job: Job, stages: Stages) -> Result:
    import actmat
    from actmat_app.view import merged_html, notes_html

    fields, is_file = _fields(job), job["out"].endswith(SUFFIX)  # a file holds no report
    report = actmat.merge(**{"diagnose": not is_file, **fields, "out": job["out"]}, progress=stages)
    page, code = Path(report.out) / "report.html", _loading_commands(str(report.out))
    return {
        "html": merged_html(report, stages.spent),
        "out": str(report.out),
        "page": str(page) if page.is_file() else "",
        "python": "\n".join(code.python),
        "vllm": code.vllm,
        "use": notes_html(code.notes),
    }


def _loading_commands(out: str) -> Serving:
    """Commands that load an output; without any, the reason is its note."""
    from actmat.errors import CheckpointError
    from actmat.extras.serving import Serving, serving_commands

    try:
        return serving_commands(out)
    except CheckpointError as error:
        return Serving((), "", (str(error),))


def _try(job: Job, stages: Stages) -> Result:
    from actmat.extras.collect.outputs import recipe_of_output
    from actmat.extras.models.loading import load_model
    from actmat.extras.tune.trying import answer
    from actmat_app.view import answers_html

    recipe = recipe_of_output(job["out"])
    places, base, answers = {"the merge": job["out"]}, recipe.base, {}
    places |= {expert.label: expert.path for expert in recipe.experts}
    stages.doing("asking", len(places) + 1)
    for name, place in places.items():
        loaded = load_model(place, adapters_base=base or None)
        base = base or (str(loaded.checkpoint) if loaded.adapter else "")
        answers[name] = answer(loaded, job["prompt"], new_tokens=job["new_tokens"])
        stages.done(len(answers))
    if base:
        answers["the base"] = answer(load_model(base), job["prompt"], new_tokens=job["new_tokens"])
    return {"html": answers_html(answers)}


def _export(job: Job, stages: Stages) -> Result:
    import actmat
    from actmat_app.view import notes_html

    return {"html": notes_html([actmat.export(job["out"], out=job["file"], to="gguf", **job["options"])])}


def _push(job: Job, stages: Stages) -> Result:
    import actmat
    from actmat_app.view import pushed_html

    return {"html": pushed_html(actmat.push(job["out"], job["repo"], public=job["public"]))}


JOBS = {"plan": (_plan, "reading the inputs"), "merge": (_merge, "reading the inputs"), "try": (_try, "loading"),
        "export": (_export, "writing"), "push": (_push, "sending")}  # fmt: skip
"""Name of a job -> its function and its first stage."""


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
        lines.write((text.replace(token, "***") if token else text) + "\n")  # one call: threads do not mix

    from actmat.errors import MergeError, memory_errors

    try:
        (do, stage), stages = JOBS[job["do"]], Stages(tell)
        stages.doing(stage)
        with memory_errors(), stages.regularly():
            result = do(job, stages)
        tell("done", **result)
    except MergeError as error:
        tell("failed", headline=error.headline, problems=[*error.problems, *getattr(error, "__notes__", ())])
    except KeyboardInterrupt as stop:
        tell("failed", headline="Stopped.", problems=getattr(stop, "__notes__", ()))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
