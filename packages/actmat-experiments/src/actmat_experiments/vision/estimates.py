"""What Theorem 1 claims, on the experts of a run: how near `D^T D` is to the Gram matrix of the layer's inputs.

Measured for every expert and layer of which there are statistics; adapters are merged into the base first.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from actmat.statistics import open_statistics
from actmat_experiments.analyses.cosine import CosineResult
from actmat_experiments.linalg import angles
from actmat_experiments.vision.backbones import read_tensors
from actmat_experiments.vision.experiment import Vision

__all__ = ["ESTIMATES", "estimate_file", "estimates", "read_estimates", "store_estimates"]

ESTIMATES = ("D^T D", "(D^T D)^1/2", "identity")


def estimate_file(cache: Path, suite: str, model: str, regime: str, seed: int) -> Path:
    """Where the cosines of a run are."""
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
