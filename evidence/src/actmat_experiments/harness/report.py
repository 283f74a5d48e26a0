"""The tables of a suite from its stored scores, with the paper's figures, on the terminal or as Markdown.

Figures of the paper are test accuracies in percent, see `actmat_experiments.paper`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.request import TableRequest
from actmat_experiments.harness.results import REFERENCES, REGIMES, Regime, Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import (
    average_table,
    figure_table,
    markdown,
    markdown_table,
    summarize,
    task_table,
)
from actmat_experiments.paper import paper_figures, paper_models, paper_tasks
from actmat_experiments.suites import SUITES, Suite, get_suite

PAPER_ROWS = (
    "The paper's data-free task arithmetic with 0.4 is lambda = 1, the row task_arithmetic_1. Its "
    "figures stand by the rows of the authors' rules: iso_c_paper, tsv_paper. Not in its tables, but in the authors' "
    "run records: task_arithmetic (0.4), ties_paper, regmean_packed (its ablation)."
)
TITLES = {"full": "full fine-tuning", "lora": "LoRA"}
_CAPTION = (
    "average: ± half of its 95 % interval, over test items and seeds; of expert: mean of\n"
    "accuracy / expert's; tuned: at the scale that is best on validation data."
)


def paper_lines(
    methods: Iterable[str], tasks: Sequence[str], figures: Mapping[str, Mapping[str, float]]
) -> dict[str, list[str]]:
    """Row -> the paper's figure of each task, "-" where it has none; rows of these that it has, in their order."""
    known = [n for n in dict.fromkeys(methods) if n in figures and set(figures[n]) & set(tasks)]
    return {n: [f"{figures[n][t]:.1f}" if t in figures[n] else "-" for t in tasks] for n in known}


def stored_scores(request: TableRequest) -> list[Score]:
    """All scores of earlier runs.

    Raises:
        RecipeError: no scores yet.
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


def show(request: TableRequest, skewed: Sequence[str] = ()) -> None:
    """Print the tables of all models and regimes that have scores.

    Args:
        skewed: tasks with one frequent answer; their balanced accuracy is shown, too.

    Raises:
        RecipeError: no scores yet.
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
        _print_notes(get_suite(request.suite), console)


def _print_notes(suite: Suite, console: Console) -> None:
    for note in (*suite.notes, *([PAPER_ROWS] if suite.paper else [])):
        console.print(f"note: {note}", markup=False, highlight=False)


def show_paper(request: TableRequest) -> None:
    """Print the figures of the paper for the models of a suite; nothing is run.

    Raises:
        RecipeError: the paper has none.
    """
    console = request.console or Console(quiet=True)
    suite = get_suite(request.suite)
    if not suite.paper:
        known = ", ".join(s.name for s in SUITES if s.paper)
        raise RecipeError(f"The paper has no figures for '{suite.name}'. It has for: {known}")
    models = [model for model in paper_models() if model.startswith(suite.paper)]
    for model, regime in itertools.product(models, REGIMES):
        figures, averages = paper_tasks(model, regime), paper_figures(model, regime)
        tasks = list(dict.fromkeys(task for row in figures.values() for task in row))
        methods = sorted(figures, key=lambda n: (n not in REFERENCES, -averages[n, "default"]))
        rows = {
            n: [f"{averages[n, 'default']:.1f}", *cells] for n, cells in paper_lines(methods, tasks, figures).items()
        }
        if not rows:
            continue
        title, head = f"The paper: {model}, {TITLES[regime]}", ["mean", *tasks]
        if request.markdown:
            text = f"**{title}**\n\n" + markdown(["", *head], [[f"`{n}`", *cells] for n, cells in rows.items()])
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(figure_table(title, rows, head))
        if ("task_arithmetic", "tuned") in averages:
            tuned = averages["task_arithmetic", "tuned"]
            console.print(f"task_arithmetic, scale chosen on validation data: average {tuned}", highlight=False)
    _print_notes(suite, console)


def _show_one(request: TableRequest, console: Console, own: Sequence[Score], skewed: Sequence[str]) -> None:
    model, regime = own[0].model, own[0].regime
    tasks = list(dict.fromkeys(s.task for s in own))
    seeds = sorted({s.seed for s in own})
    lines = summarize(own, tasks, paper_figures(model, regime))
    printed = paper_lines([line.method for line in lines], tasks, paper_tasks(model, regime))
    title = " ".join(filter(None, [model, TITLES[regime]])) + f", {len(tasks)} tasks"
    title += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if request.markdown:
        text = f"**{title}**\n\n{markdown_table(lines, tasks)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if printed:
            rows = markdown(["the paper's", *tasks], [[f"`{name}`", *cells] for name, cells in printed.items()])
            console.print(rows, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(average_table(f"Test accuracy in %: {title}", lines, _CAPTION))
        console.print(task_table("Per task, at the default scale", lines, tasks))
        if printed:
            console.print(figure_table("The same in the paper's run records", printed, tasks))
    for task in (t for t in skewed if t in tasks):
        values = ", ".join(f"{method} {100 * v:.1f}" for method, v in balanced(own, task).items())
        text = f"{task}, balanced over its answers (majority is 1/answers): {values}"
        console.print(text, markup=False, highlight=False)
