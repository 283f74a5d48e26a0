"""Scores to tables, for both suites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from actmat.errors import RecipeError
from actmat_experiments.harness.results import Regime, Score, read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import Figure, average_table, markdown_table, summarise, task_table

__all__ = ["balanced", "groups", "show"]

Group = tuple[str, Regime, str]


def groups(scores: Iterable[Score]) -> dict[Group, list[Score]]:
    """(model, regime, settings) -> scores that may stand in one table, in the order of their first appearance."""
    found: dict[Group, list[Score]] = {}
    for score in scores:
        found.setdefault((score.model, score.regime, score.settings), []).append(score)
    return found


def balanced(scores: Sequence[Score], task: str) -> dict[str, float]:
    """Row -> balanced accuracy on a task at the default scale, mean over seeds."""
    found: dict[str, list[float]] = {}
    for score in scores:
        if score.task == task and score.scale == "default" and "balanced" in score.detail:
            found.setdefault(score.method, []).append(score.detail["balanced"])
    return {method: sum(values) / len(values) for method, values in found.items()}


def show(
    suite: str,
    cache: Path,
    console: Console,
    *,
    markdown: bool,
    figures: Mapping[tuple[str, Regime], Figure] | None = None,
    notes: Sequence[str] = (),
    skewed: Sequence[str] = (),
) -> None:
    """Print one table of averages and one per task, for every model, regime and set of settings that was run.

    Args:
        suite: its name.
        cache: folder that `run` has filled.
        console: where to.
        markdown: for a page, instead of a terminal.
        figures: (model, regime) -> the paper's.
        notes: what to know about the figures, below the tables.
        skewed: tasks with one frequent answer; their balanced accuracy is shown, too.

    Raises:
        RecipeError: nothing was run.
    """
    scores = read_scores(score_file(cache, suite))
    if not scores:
        raise RecipeError(f"There are no scores in {score_file(cache, suite)}: run 'actmat experiment run {suite}'.")
    for (model, regime, settings), group in groups(scores).items():
        tasks = list(dict.fromkeys(s.task for s in group if s.method == "majority"))
        lines = summarise(group, tasks, (figures or {}).get((model, regime)))
        seeds = ", ".join(map(str, sorted({s.seed for s in group})))
        title = f"{model or suite}, {'LoRA' if regime == 'lora' else 'full fine-tuning'}, seeds {seeds}"
        caption = _caption(group, tasks, settings)
        extra = _skew_lines(group, [t for t in skewed if t in tasks])
        if markdown:
            text = "\n".join([f"{title}.", "", markdown_table(lines, tasks), *extra])
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(f"{title}\n", style="bold", markup=False, highlight=False)
            console.print(average_table("Test accuracy in %", lines, caption))
            console.print(task_table("Test accuracy in % per task, default scale", lines, tasks))
            for line in extra:
                console.print(line, markup=False, highlight=False)
    for note in notes if figures else ():
        console.print(f"* {note}", markup=False, highlight=False, soft_wrap=markdown)


def _caption(scores: Sequence[Score], tasks: Sequence[str], settings: str) -> str:
    n = {s.task: s.total for s in scores if s.method == "majority"}
    return (
        f"±: half of the 95 % interval. of expert: mean of accuracy / expert's.\n"
        f"tuned: scale chosen on validation. {sum(n.values())} test items of {len(tasks)} tasks. settings {settings}"
    )


def _skew_lines(scores: Sequence[Score], tasks: Sequence[str]) -> list[str]:
    found = []
    for task in tasks:
        values = ", ".join(f"{method} {100 * v:.1f}" for method, v in balanced(scores, task).items())
        found.append(f"{task}, balanced over its answers (majority is 1/answers): {values}")
    return found
