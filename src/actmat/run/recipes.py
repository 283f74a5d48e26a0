"""The one way from recipes to finished outputs: open -> prepare -> resume -> stage -> execute -> finish."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.diagnostics.build import build_diagnosis
from actmat.diagnostics.model import Diagnosis
from actmat.errors import memory_errors
from actmat.planning import MergePlan
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.run.driver import execute, finish
from actmat.run.inputs import open_inputs
from actmat.run.locate import Held
from actmat.run.output import DrawPage, Output, stage
from actmat.run.resume import MergeReport, resume
from actmat.run.run import plan_all, prepare
from actmat.settings import RunSettings


@memory_errors()  # outside of the staged outputs, which keep what is finished
def run_recipes(
    recipes: Sequence[Recipe],
    settings: RunSettings | None = None,
    progress: Progress | None = None,
    *,
    draw: DrawPage | None = None,
    doing: str = "merging",
) -> list[MergeReport]:
    """Carry out recipes that share inputs and compute dtype; every tensor is read once for all of them.

    An output that an earlier call with the same recipe and inputs finished is not made again, unless it may be
    overwritten.

    Args:
        recipes: each with its own `out`.
        settings: how to run them.
        progress: receives callbacks.
        draw: writes the page of a measured merge into its output; None: no page.
        doing: what the callbacks call the merge.

    Raises:
        MergeError: an `out` exists only if that output was finished. Finished parts of the others are kept for the
            same call, and a note of the error says so, unless the error would recur.
    """
    settings, progress = settings or RunSettings(), progress or Progress()
    with open_inputs(recipes, settings, "outputs") as (inputs, places):
        run = prepare(inputs, places)
        reports = resume(run)
        if run.unfinished:
            with stage(run) as outputs:
                execute(outputs, run, progress, doing)
                reports |= finish(outputs, run, draw)
        return [reports[out] for out in places.outs]


def plan_recipe(
    recipe: Recipe, *, device: str = "cpu", device_memory: str | int | None = None, held: Held | None = None
) -> MergePlan:
    """The plan of a recipe, from headers only.

    Args:
        recipe: of the merge.
        device, device_memory, held: see `RunSettings`; the devices need not be on this machine.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    settings = RunSettings(device=device, device_memory=device_memory, held=held or {})
    with open_inputs([recipe], settings, here=False) as (inputs, places):
        return plan_all(inputs, places.room)[0]


@memory_errors()
def diagnose_recipe(recipe: Recipe, settings: RunSettings | None = None, progress: Progress | None = None) -> Diagnosis:
    """Measure what merging a recipe would do; nothing is written, its `out` is ignored.

    Raises:
        MergeError: as merging it would.
    """
    with open_inputs([recipe], settings) as (inputs, places):
        run = prepare(inputs, places, measured=True)
        copies = frozenset(i.name for i in run.plans[0].items if i.call is None)  # which need no measurement
        output = Output(run.plans[0], None, done=copies)
        execute([output], run, progress or Progress(), "measuring")
        return build_diagnosis(output.plan, output.records, out=None)
