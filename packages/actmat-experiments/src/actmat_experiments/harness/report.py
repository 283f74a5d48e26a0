"""The tables of a suite from its stored scores, the paper's figures beside, on the terminal or as Markdown.

Figures of the paper's tables 1 and 2 are average test accuracies in percent. M. G. Abdel Hameed et al., "Model Merging
via Data-Free Covariance Estimation", 2026, arXiv:2604.01329.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.results import REGIMES, Regime, ScaleKind, Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import Figure, average_table, markdown_table, summarise, task_table
from actmat_experiments.suites import TableRequest

__all__ = ["NOTES", "TITLES", "balanced", "latest", "paper_figures", "show", "stored_scores"]


_MODELS = ("T5-base", "T5-large", "ViT-B/16", "ViT-B/32", "ViT-L/14")

_FULL: Mapping[tuple[str, ScaleKind], tuple[float, ...]] = {
    ("base", "default"): (54.0, 51.3, 55.5, 48.2, 65.2),
    ("experts", "default"): (76.0, 82.4, 94.6, 90.4, 94.1),
    ("regmean", "default"): (74.5, 80.8, 87.6, 83.0, 90.0),
    ("task_arithmetic", "tuned"): (71.4, 69.7, 76.1, 69.7, 84.3),
    ("average", "default"): (64.8, 50.9, 72.2, 65.5, 79.3),
    ("iso_c", "default"): (66.1, 57.6, 88.4, 81.6, 90.5),
    ("tsv", "default"): (72.9, 74.7, 88.8, 83.3, 91.1),
    ("actmat", "default"): (76.0, 79.8, 89.5, 82.9, 92.2),
}
_LORA: Mapping[tuple[str, ScaleKind], tuple[float, ...]] = {
    ("experts", "default"): (76.5, 79.2, 84.1, 80.7, 89.0),
    ("regmean", "default"): (75.9, 77.7, 80.3, 76.5, 86.9),
    ("average", "default"): (62.2, 57.2, 64.3, 56.8, 72.4),
    ("iso_c", "default"): (56.1, 52.1, 57.5, 50.4, 66.8),
    ("knots_iso_c", "default"): (64.7, 69.4, 74.9, 70.4, 83.6),
    ("tsv", "default"): (72.2, 75.4, 78.4, 73.0, 85.4),
    ("knots_tsv", "default"): (67.6, 71.1, 74.8, 69.6, 83.4),
    ("actmat", "default"): (72.0, 76.7, 78.6, 74.6, 86.1),
}

NOTES: dict[str, tuple[str, ...]] = {
    "vision": (
        "The paper's LoRA experts adapt the packed q, k and v alone and its LoRA row of RegMean reuses the statistics "
        "of full fine-tuning; here all linear layers are adapted.",
        "The paper's 'data-free task arithmetic, 0.4' is in truth lambda = 1; it is not repeated here.",
        "The paper's ViT-B/16 expert of DTD (98.3 %) looks trained on test images.",
    ),
    "language": (
        "The paper's Story Cloze was rendered with empty choices: 51.2 % for every model, so its averages hold a "
        "constant for that task.",
        "The paper's WikiQA sits at its majority class.",
        "Iso-C at scale 1 is under-scaled for T5.",
    ),
}
"""Figures of the paper that cannot hold, or were measured on something else; printed below the tables."""


def paper_figures(model: str, regime: Regime) -> Figure:
    """The paper's averages for a model, empty for a model that it does not have."""
    if model not in _MODELS:
        return {}
    column = _MODELS.index(model)
    rows = _FULL if regime == "full" else _LORA
    return {row: figures[column] for row, figures in rows.items()}


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
