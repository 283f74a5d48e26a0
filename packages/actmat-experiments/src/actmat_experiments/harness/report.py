"""The tables of a suite from its stored scores, the paper's figures beside, on the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.results import REGIMES, Regime, Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import average_table, markdown_table, summarise, task_table
from actmat_experiments.paper import NOTES, paper_figures
from actmat_experiments.suites import TableRequest

__all__ = ["TITLES", "balanced", "latest", "show", "stored_scores"]

TITLES = {"full": "full fine-tuning", "lora": "LoRA"}
_CAPTION = (
    "average: ± half of its 95 % interval, over test items and seeds; of expert: mean of\n"
    "accuracy / expert's; tuned: at the scale that is best on validation data."
)


def stored_scores(request: TableRequest) -> list[Score]:
    """All scores of earlier runs.

    Raises:
        RecipeError: there are none yet.
    """
    path = score_file(request.cache, request.suite)
    scores = read_scores(path)
    if not scores:
        raise RecipeError(f"{path} holds no scores; run first: actmat experiment run {request.suite}")
    return scores


def latest(scores: Sequence[Score], model: str, regime: Regime) -> tuple[list[Score], int]:
    """The scores of the settings that were run last, and how many other settings there are."""
    own = [s for s in scores if (s.model, s.regime) == (model, regime)]
    settings = list(dict.fromkeys(s.settings for s in own))
    return [s for s in own if s.settings == settings[-1]] if settings else [], max(0, len(settings) - 1)


def balanced(scores: Sequence[Score], task: str) -> dict[str, float]:
    """Row -> balanced accuracy on a task at the default scale, mean over seeds."""
    found: dict[str, list[float]] = {}
    for score in scores:
        if score.task == task and score.scale == "default" and "balanced" in score.detail:
            found.setdefault(score.method, []).append(score.detail["balanced"])
    return {method: sum(values) / len(values) for method, values in found.items()}


def show(request: TableRequest, skewed: Sequence[str] = ()) -> list[Score]:
    """Print the tables of all models and regimes that have scores; returns the scores.

    Args:
        skewed: tasks with one frequent answer; their balanced accuracy is shown, too.

    Raises:
        RecipeError: there are no scores yet.
    """
    scores = stored_scores(request)
    console = request.console or Console(quiet=True)
    for model in dict.fromkeys(s.model for s in scores):
        for regime in REGIMES:
            own, others = latest(scores, model, regime)
            if own:
                _show_one(request, console, own, skewed)
            if others:
                text = f"note: {others} other setting(s) of this suite are in the cache, not shown"
                console.print(text, highlight=False)
    if any(s.model for s in scores):
        for note in NOTES.get(request.suite, ()):
            console.print(f"note: {note}", markup=False, highlight=False)
    return scores


def _show_one(request: TableRequest, console: Console, own: Sequence[Score], skewed: Sequence[str]) -> None:
    model, regime = own[0].model, own[0].regime
    tasks = list(dict.fromkeys(s.task for s in own))
    seeds = sorted({s.seed for s in own})
    lines = summarise(own, tasks, paper_figures(model, regime))
    title = " ".join(filter(None, [model, TITLES[regime]])) + f", {len(tasks)} tasks"
    title += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if request.markdown:
        text = f"**{title}**\n\n{markdown_table(lines, tasks)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(average_table(f"Test accuracy in %: {title}", lines, _CAPTION))
        console.print(task_table("Per task, at the default scale", lines, tasks))
    for task in (t for t in skewed if t in tasks):
        values = ", ".join(f"{method} {100 * v:.1f}" for method, v in balanced(own, task).items())
        text = f"{task}, balanced over its answers (majority is 1/answers): {values}"
        console.print(text, markup=False, highlight=False)
