"""Size and overlap of the adapters of an experiment, as `auto` sees them: a line of JSON per suite, model and seed."""

from __future__ import annotations

import json
from pathlib import Path

from actmat_experiments.core import locate_inputs, make_recipe, size_and_overlap
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.origin import commit


def size_file(cache: Path, suite: str) -> Path:
    """File of a suite's sizes."""
    return cache / "scores" / f"{suite}-sizes.jsonl"


def adapter_size(experiment: Experiment) -> dict[str, float]:
    """See `size_and_overlap`; empty for full models."""
    experts = [{"path": str(made.path), "name": task} for task, made in experiment.experts().items()]
    with locate_inputs(make_recipe({"base": str(experiment.base.path), "experts": experts})) as given:
        size, overlap = size_and_overlap(given) or (None, 0.0)
    return {} if size is None else {"size": round(size, 6), "overlap": round(overlap, 3)}


def store_size(experiment: Experiment, path: Path) -> None:
    """Add the size of an experiment's adapters to a file, unless it is there."""
    about = experiment.about
    rows = json_lines(path.read_text(encoding="utf-8")) if path.is_file() else []
    if about["regime"] == "full" or any({n: row[n] for n in about} == about for row in rows):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(about | adapter_size(experiment) | {"commit": commit()}) + "\n")
