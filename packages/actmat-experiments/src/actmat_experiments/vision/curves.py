"""The curves of the vision suites, accuracy by number of experts and RegMean's by number of images; and how near
`D^T D` is to the Gram matrix of the layer's inputs, for every expert and layer of which there are statistics.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.analyses import angles
from actmat_experiments.analyses.estimates import CosineResult
from actmat_experiments.core import open_statistics
from actmat_experiments.harness.experiment import Counts, Experiment
from actmat_experiments.harness.merging import Candidate
from actmat_experiments.harness.suite import Experiments, run_experiments
from actmat_experiments.suites import RunRequest
from actmat_experiments.vision.backbones import read_tensors
from actmat_experiments.vision.experiment import Vision

ESTIMATES = ("D^T D", "(D^T D)^1/2", "identity")


def estimate_file(cache: Path, suite: str, model: str, regime: str, seed: int) -> Path:
    """File of a run's cosines."""
    name = "-".join(filter(None, [suite, model.replace("/", "-"), regime, f"seed{seed}"]))
    return cache / "estimates" / f"{name}.json"


def estimates(vision: Vision) -> CosineResult:
    """Cosines of the estimates with the Gram matrices, per layer and expert."""
    base = read_tensors(vision.base.path)
    measured = vision.statistics()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, expert in vision.experts().items():
        tensors = _tensors(vision, expert.path)
        with open_statistics(measured[task].path) as statistics:
            for name, origin in base.items():
                key = statistics.find(name)
                if key is None or origin.dim() != 2:
                    continue
                gram_II = statistics.gram(key, dtype=torch.float64)
                delta_OI = tensors[name].double() - origin.double()
                for estimate, matrix_II in _estimates(delta_OI).items():
                    row = found.setdefault(name, {}).setdefault(estimate, {})
                    row[task] = angles.cosine(matrix_II, gram_II)
    return CosineResult(found, 0)


def store_estimates(vision: Vision, folder: Path) -> Path:
    """Measure and keep them; whatever was there is replaced."""
    path = estimate_file(folder, vision.suite, vision.model, vision.regime, vision.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(estimates(vision).data()) + "\n", encoding="utf-8")
    return path


def read_estimates(folder: Path, suite: str, model: str, regime: str) -> CosineResult | None:
    """Of all seeds together, or None where there are none."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    first = estimate_file(folder, suite, model, regime, 0)
    for path in sorted(first.parent.glob(first.name.replace("seed0.json", "seed*.json"))):
        seed = path.stem.rpartition("-")[2]
        for layer, by_estimate in json.loads(path.read_text(encoding="utf-8"))["layers"].items():
            for estimate, by_task in by_estimate.items():
                row = found.setdefault(layer, {}).setdefault(estimate, {})
                row |= {f"{task}, {seed}": value for task, value in by_task.items()}
    return CosineResult(found, 0) if found else None


def _tensors(vision: Vision, expert: Path) -> dict[str, Tensor]:
    """An expert's weights under the names of the base's files, which are not those of the modules."""
    if not (expert / "adapter_config.json").is_file():
        return read_tensors(expert)
    with tempfile.TemporaryDirectory() as folder:
        vision.load(expert).save_pretrained(folder)
        return read_tensors(Path(folder))


def _estimates(delta_OI: Tensor) -> dict[str, Tensor]:
    gram_II = angles.gram_of(delta_OI)
    _, singular_K, right_KI = torch.linalg.svd(delta_OI, full_matrices=False)
    root_II = (right_KI.mT * singular_K) @ right_KI
    return dict(zip(ESTIMATES, (gram_II, root_II, torch.eye(len(gram_II), dtype=gram_II.dtype)), strict=True))


CURVE_ROWS = (
    "average",
    "task_arithmetic",
    "ties",
    "tsv",
    "iso_c",
    "regmean",
    "actmat",
    "actmat_ridge",
)
"""Rows of the figure of accuracy against the number of experts, as far as they can run."""

SAMPLE_COUNTS = (1, 4, 16, 64, 320)
"""Images per task of the figure of RegMean's accuracy against what it was given."""


def curve_file(cache: Path, suite: str) -> Path:
    """File of the points of the curves: merges of subsets, RegMean by number of images."""
    return cache / "scores" / f"{suite}-curves.jsonl"


def store_curves(vision: Vision, rows: Sequence[Candidate], subsets: int) -> None:
    """Add the points of the curves of an experiment, and how near `D^T D` is to the Gram matrices.

    Args:
        rows: all rows of the tables; those of `CURVE_ROWS` are merged over subsets.
    """
    path = curve_file(vision.cache.root, vision.suite)
    _append(path, _points_of_subsets(vision, [row for row in rows if row.name in CURVE_ROWS], subsets))
    _append(path, _points_of_samples(vision))
    store_estimates(vision, vision.cache.root)


def run_vision(request: RunRequest, experiments: Experiments, n_tasks: int, subsets: int) -> None:
    """`run_experiments`; if `subsets` > 0, also the curves."""

    def more(experiment: Experiment, rows: Sequence[Candidate]) -> None:
        if subsets and isinstance(experiment, Vision):
            store_curves(experiment, rows, subsets)

    run_experiments(request, experiments, n_tasks, more)


def subsets_of(names: Sequence[str], size: int, n: int, seed: int) -> list[tuple[str, ...]]:
    """At most `n` subsets of a size, drawn without repetition, in the order in which they were drawn."""
    everything = list(combinations(names, size))
    order = torch.randperm(len(everything), generator=generator_for(seed, f"subsets of {size}")).tolist()
    return [everything[i] for i in order[:n]]


def _points_of_subsets(vision: Vision, rows: Sequence[Candidate], n: int) -> Iterator[dict[str, Any]]:
    references = {(s.method, s.task): s.share for s in vision.references()}
    for size in range(2, len(vision.names) + 1):
        for chosen in subsets_of(vision.names, size, n, vision.seed):
            found = vision.merges(rows, only=chosen, tune=False)
            shares = {row: _shares(result["test"]) for row, result in found.items()}
            shares |= {w: {t: references[w, t] for t in chosen} for w in ("base", "experts")}
            for row, by_task in shares.items():
                yield _identity(vision) | {"curve": "subsets", "method": row, "shares": by_task}


def _points_of_samples(vision: Vision) -> Iterator[dict[str, Any]]:
    row = Candidate("regmean", "regmean")
    for n in SAMPLE_COUNTS:
        if n <= min(len(task.train) for task in vision.tasks):
            found = vision.merges([row], tune=False, samples=n)["regmean"]["test"]
            point = {"curve": "samples", "method": "regmean", "samples": n, "shares": _shares(found)}
            yield _identity(vision) | point


def _shares(found: Mapping[str, Counts]) -> dict[str, float]:
    return {task: counts["correct"] / counts["total"] for task, counts in found.items()}


def _identity(vision: Vision) -> dict[str, Any]:
    return {"model": vision.model, "regime": vision.regime, "seed": vision.seed, "settings": vision.digest}


def _append(path: Path, points: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for point in points:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
