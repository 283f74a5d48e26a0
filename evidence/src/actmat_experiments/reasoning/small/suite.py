"""The suite `reasoning-small`: all stages in order, scores, tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from actmat_experiments.core import one_thread
from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import stored_scores
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import REFERENCES, Score
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import known_names, refuse_flags, request_fields, run_experiments
from actmat_experiments.harness.table import Line, average_table, markdown_table, summarize
from actmat_experiments.reasoning.passk import Columns, at, at_k_markdown, at_k_table
from actmat_experiments.reasoning.small.experiment import Small, trained_base
from actmat_experiments.reasoning.small.model import SmallSettings
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Puzzle

NAME = "reasoning-small"
PRECISION = "float32"
"""Of the weights that are trained and merged; `Score.model`."""
STATISTICS = ("gram",)
"""Kinds of statistics that are measured on the experts' training prompts."""


def run(request: RunRequest) -> list[Score]:
    """Base, experts, merges and answers of every seed; cached results are not made again.

    Returns:
        The scores, which are also added to `scores/reasoning-small.jsonl` in the cache.

    Raises:
        RecipeError: a setting, task or method is unknown, or requests something that the suite lacks.
    """
    changed(SmallSettings(), request.settings)
    with one_thread():
        return run_experiments(request, experiments, len(_check(request)), kinds=STATISTICS)


def experiments(request: RunRequest, watch: Watch) -> Iterator[Small]:
    """One for each seed."""
    s, puzzles, cache = changed(SmallSettings(), request.settings), _check(request), Cache(request.cache)
    names, libraries = [p.name for p in puzzles], library_versions("actmat", "torch", "trl")
    for seed in request.seeds:
        yield Small(
            **request_fields(request, watch),
            model=PRECISION,
            regime="full",
            seed=seed,
            digest=digest({"settings": s, "tasks": names, "libraries": libraries}),
            base=trained_base(cache, watch, s, seed),
            scales=s.scales,
            samples=s.measured,
            settings=s,
            tasks=puzzles,
        )


def _check(request: RunRequest) -> Sequence[Puzzle]:
    refuse_flags(request, "models", "data", regime="full")
    names = known_names(request.tasks, [p.name for p in PUZZLES])
    return [p for p in PUZZLES if p.name in names]


def table(request: TableRequest) -> list[Line]:
    """The tables of the latest settings in the cache: per task at 1 and k answers, and averages.

    Raises:
        RecipeError: nothing has been run with this cache.
    """
    scores = stored_scores(request)
    scores = [s for s in scores if s.settings == scores[-1].settings]
    tasks = list(dict.fromkeys(s.task.partition("@")[0] for s in scores))
    k = max(int(s.task.partition("@")[2]) for s in scores)
    console = request.console or Console(quiet=True)
    columns: Columns = [(at(t, n), at(t, n)) for t in tasks for n in (1, k)]
    own = [s for s in scores if not s.method.startswith("expert ")]
    lines = summarize(own, [at(t, 1) for t in tasks])
    experts = [f"expert {t}" for t in tasks]
    merged = [line.method for line in lines if line.scale == "default" and line.method not in REFERENCES]
    order = ["base", *experts, "experts", *dict.fromkeys(merged)]
    at_default = [s for s in scores if s.scale == "default"]
    seeds = ", ".join(str(n) for n in sorted({s.seed for s in scores}))
    n, temperature = int(scores[0].detail["n_samples"]), scores[0].detail["temperature"]
    title, averages = "Right answers in percent", "Average over @1"
    said = f"{scores[0].total} prompts per task, {n} answers each at T={temperature:g}; seeds {seeds}"
    if request.markdown:
        text = f"{title}; {said}\n\n{at_k_markdown(at_default, columns, order)}\n{averages}\n\n"
        console.print(text + markdown_table(lines, [at(t, 1) for t in tasks]), markup=False, soft_wrap=True)
    else:
        console.print(at_k_table(title, at_default, columns, order, said))
        console.print(average_table(averages, lines, "± half of the 95 % interval over prompts and seeds"))
    return lines
