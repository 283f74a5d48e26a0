"""Merge plain tensors on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import actmat

Tensors = Mapping[str, Tensor]


def merge_tensors(base: Tensors, experts: Sequence[Tensors], folder: Path, **fields: Any) -> actmat.MergeReport:
    """Save tensors as bare files in `folder` and merge them into `folder/out` with the public function."""
    folder.mkdir(exist_ok=True)
    for name, tensors in {"base": base, **{f"expert{i}": e for i, e in enumerate(experts)}}.items():
        save_file(dict(tensors), folder / f"{name}.safetensors")
    places = [folder / f"expert{i}.safetensors" for i in range(len(experts))]
    settings = {"method": "actmat", "threads": 1, "durable": False, "out": folder / "out", **fields}
    return actmat.merge(folder / "base.safetensors", places, **settings)


def output(report: actmat.MergeReport) -> dict[str, Tensor]:
    """Tensors of an output in one file."""
    return load_file(report.out / "model.safetensors")
