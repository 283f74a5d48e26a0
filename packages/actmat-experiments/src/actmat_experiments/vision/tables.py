"""The tables of a suite from its stored scores, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.results import Regime, Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import average_table, markdown_table, summarise, task_table
from actmat_experiments.paper import NOTES, paper_figures
from actmat_experiments.suites import TableRequest

__all__ = ["latest", "show"]

_TITLES = {"full": "full fine-tuning", "lora": "LoRA"}
_CAPTION = (
    "average: ± half of its 95 % interval, over test items and seeds; of expert: mean of\n"
    "accuracy / expert's; tuned: at the scale that is best on validation data."
)


def latest(scores: Sequence[Score], model: str, regime: Regime) -> tuple[list[Score], int]:
    """The scores of the settings that were run last, and how many other settings there are."""
    own = [s for s in scores if (s.model, s.regime) == (model, regime)]
    settings = list(dict.fromkeys(s.settings for s in own))
    return [s for s in own if s.settings == settings[-1]] if settings else [], max(0, len(settings) - 1)


def show(request: TableRequest, models: Sequence[str]) -> None:
    """Print the tables of all models and regimes that have scores; draw the figures if asked to.

    Raises:
        RecipeError: there are no scores yet.
    """
    path = score_file(request.cache, request.suite)
    scores = read_scores(path)
    if not scores:
        raise RecipeError(f"{path} holds no scores; run first: actmat experiment run {request.suite}")
    console = request.console or Console(quiet=True)
    for model in models:
        for regime in get_args(Regime):
            own, others = latest(scores, model, regime)
            if own:
                _show_one(request, console, own, model, regime, others)
    if any(model for model in models):
        for note in NOTES.get(request.suite, ()):
            console.print(f"note: {note}", highlight=False)
    if request.figures is not None:
        from actmat_experiments.vision.figures import draw

        for figure in draw(request, scores, models):
            console.print(f"drawn: {figure}", highlight=False)


def _show_one(
    request: TableRequest, console: Console, own: Sequence[Score], model: str, regime: Regime, others: int
) -> None:
    tasks = list(dict.fromkeys(s.task for s in own))
    seeds = sorted({s.seed for s in own})
    lines = summarise(own, tasks, paper_figures(model, regime))
    title = " ".join(filter(None, [model, _TITLES[regime]])) + f", {len(tasks)} tasks"
    title += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if request.markdown:
        print(f"**{title}**\n\n{markdown_table(lines, tasks)}")  # noqa: T201  # goes into a file as it is
    else:
        console.print(average_table(f"Test accuracy in %: {title}", lines, _CAPTION))
        console.print(task_table("Per task, at the default scale", lines, tasks))
    if others:
        console.print(f"note: {others} other setting(s) of this suite are in the cache, not shown", highlight=False)
