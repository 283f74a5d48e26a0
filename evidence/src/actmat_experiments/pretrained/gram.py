"""Does `D^T D` know the inputs? Its cosine with the Gram matrix that was measured, per expert and layer, against the
cosine of the identity, which knows nothing.

One line of JSON per suite, model, regime, seed, task and tensor. Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.analyses.angles import cosine
from actmat_experiments.core import open_statistics
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.models import is_adapter, read_tensors
from actmat_experiments.harness.origin import commit
from actmat_experiments.harness.sizes import adapter_size


def gram_file(cache: Path, suite: str) -> Path:
    """File of a suite's cosines."""
    return cache / "scores" / f"{suite}-gram.jsonl"


def store_gram(experiment: Experiment, path: Path) -> None:
    """Add the cosines of an experiment to a file, unless they are there."""
    about = {**experiment.about, "samples": experiment.samples}
    rows = json_lines(path.read_text(encoding="utf-8")) if path.is_file() else []
    if any({n: row[n] for n in about} == about for row in rows):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    starts: dict[str, Any] = {n: v for n, v in adapter_size(experiment).items() if n == "overlap"}
    starts["commit"] = commit()
    text = "".join(json.dumps(about | row | starts) + "\n" for row in gram_rows(experiment))
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def gram_rows(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Task, tensor, cosines of `D^T D` and of the identity with the Gram matrix, and `||D||_F / ||W_0||_F`.

    Matrices that the expert has not changed are left out.
    """
    base = read_tensors(experiment.base.path)
    measured = experiment.statistics(kinds=("gram",))
    for task, expert in experiment.experts().items():
        tensors = _tensors(experiment, expert.path)
        with open_statistics(measured[task].path) as statistics:
            for name, origin_OI in base.items():
                key = statistics.find(name)
                if key is None or origin_OI.dim() != 2:
                    continue
                gram_II = statistics.gram(key, dtype=torch.float32)
                delta_OI = tensors[name].float() - origin_OI.float()
                if not delta_OI.any():  # a weight that was not trained says nothing of its inputs
                    continue
                yield {
                    "task": task,
                    "tensor": name,
                    "estimate": round(cosine(delta_OI.mT @ delta_OI, gram_II), 5),
                    "identity": round(float(gram_II.trace() / gram_II.norm() / len(gram_II) ** 0.5), 5),
                    "change": round(float(delta_OI.norm() / origin_OI.norm()), 6),
                }


def _tensors(experiment: Experiment, expert: Path) -> dict[str, Tensor]:
    """An expert's weights under the names of the base's file, which are not always those of the modules."""
    if not is_adapter(expert):
        return read_tensors(expert)
    with tempfile.TemporaryDirectory() as folder:
        experiment.load(expert).save_pretrained(folder)
        return read_tensors(Path(folder))
