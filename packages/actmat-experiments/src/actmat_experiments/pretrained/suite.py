"""Rows and runs that the suites on pretrained models share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.merging import Candidate, needs_statistics
from actmat_experiments.harness.suite import Experiments, run_experiments, score_file
from actmat_experiments.pretrained.gram import gram_file, store_gram
from actmat_experiments.suites import RunRequest

__all__ = [
    "ENCODER",
    "POSTPROCESSED",
    "ROWS",
    "SCALES",
    "SPACES",
    "STRENGTHS",
    "TOGETHER",
    "copy_model",
    "run_pretrained",
]

SCALES = (0.5, 1.0, 2.0)
"""Factors of the merged delta that tuning tries."""

ROWS = (
    *("average", "task_arithmetic", "ties", "tsv", "iso_c", "actmat", "actmat_ridge", "actmat_bounded", "regmean"),
    *("tact", "wudi", "swudi", "aswudi", "ace", "centred", "cart", "dc_merge", "resmerge", "orthomerge", "knots"),
    *("iso_cts", "ctm", "sce", "model_stock", "karcher", "dare", "della", "breadcrumbs", "cat", "lot", "fisher"),
)
"""Rows that are compared unless a request names others."""

POSTPROCESSED = (
    Candidate("average+isotropise", "average", fields={"post": ["isotropise"]}),
    Candidate("task_arithmetic+subspace_boosting", "task_arithmetic", fields={"post": ["subspace_boosting"]}),
    *(Candidate(f"actmat+{step}", "actmat", fields={"post": [step]}) for step in ("svc", "esm", "larv")),
)
"""Rows with a step of post-processing."""

SPACES = (
    *(Candidate(f"{method}@core", method, fields={"space": "core"}) for method in ("tsv", "ties", "iso_c")),
    *(Candidate(f"{method}@factors", method, fields={"space": "factors"}) for method in ("ties", "dare")),
)
"""Rows of adapters seen in another space."""

STRENGTHS = tuple(
    Candidate(f"{method}:{option}={value:g}", method, {option: value})
    for method, option, values in (
        ("actmat", "rtol", (1e-6, 1e-3, 1e-2)),
        ("actmat_ridge", "ridge", (0.01, 1.0)),
        ("actmat_bounded", "ridge", (0.1, 10.0)),
    )
    for value in values
)
"""Other cut-offs, ridges and bounds than the defaults: a relative cut-off of 4.6e-5 for layers 384 wide, 0.1 and 1."""

TOGETHER = 3
"""Models merged in one reading, and lost at most by an interruption."""

ENCODER = "encoder"
"""Folder of the base in its stage of the cache."""


def copy_model(folder: Path, out: Path) -> None:
    """Copy config, weights and tokenizer of a model into `out/encoder`."""
    (out / ENCODER).mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors"):
            shutil.copyfile(path, out / ENCODER / path.name)


def run_pretrained(request: RunRequest, experiments: Experiments, n_tasks: int) -> None:
    """See `run_experiments`. `POSTPROCESSED`, `SPACES` and `STRENGTHS` have names, too, and run if none are named."""
    wanted = request.methods
    named = {row.name for row in (*POSTPROCESSED, *STRENGTHS, *SPACES)}
    rules = ROWS if wanted is None else tuple(name for name in wanted if name not in named)

    def more(experiment: Experiment, rows: Sequence[Candidate]) -> None:
        if needs_statistics(rows):
            store_gram(experiment, gram_file(request.cache, request.suite))
        there = (*POSTPROCESSED, *STRENGTHS, *(SPACES if experiment.regime == "lora" else ()))
        if others := [row for row in there if wanted is None or row.name in wanted]:
            experiment.compare(others, score_file(request.cache, request.suite))

    run_experiments(replace(request, methods=rules), experiments, n_tasks, more)
