"""The suite `quick`: the tasks of `actmat demo`, whose base and experts are trained in a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from actmat.errors import RecipeError
from actmat.extras.demo.run import accuracy_table, run_demo
from actmat_experiments.harness.report import stored_scores
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import Score, append_scores
from actmat_experiments.harness.suite import score_file


def run(request: RunRequest) -> None:
    """Train, merge and test every seed; nothing but the results is kept.

    Raises:
        RecipeError: a method cannot run, or a flag asks for what the suite lacks.
    """
    others = (request.models, request.tasks, request.data, request.settings, request.device != "cpu")
    if any(others) or list(request.regimes) != ["full"]:
        raise RecipeError("The suite 'quick' takes --methods, --seeds and --cache only.")
    for seed in request.seeds:
        with tempfile.TemporaryDirectory() as folder:
            result = run_demo(Path(folder, "demo"), seed=seed, methods=request.methods)
        n = result["settings"]["n_test"]
        scores = [
            Score(request.suite, "full", row["name"], "default", task, seed, round(share * n), n, detail={"row": row})
            for row in result["rows"]
            for task, share in row["tasks"].items()
        ]
        append_scores(score_file(request.cache, request.suite), scores)


def table(request: TableRequest) -> None:
    """Show a table of each seed; the intervals are over photographs, which all tasks share."""
    if request.markdown:
        raise RecipeError("The suite 'quick' has no tables in Markdown; --json prints its scores.")
    scores = stored_scores(request)
    console = request.console or Console(quiet=True)
    for seed in sorted({score.seed for score in scores}):
        rows = {s.method: s.detail["row"] for s in scores if s.seed == seed}
        title = f"Test accuracy in %, {scores[0].total} photographs, seed {seed}"
        console.print(accuracy_table(list(rows.values()), title))
