"""Second moments of the inputs of every layer, in files: those of seven experts of a ViT-S/14 take a gigabyte.

Shapes: `I` in_features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from actmat_experiments.core import collect_unbound, unpack
from actmat_experiments.datafree.matrices import Key
from benchmarks.pretrained.subjects import Inputs, Subject


class StoredGrams(Mapping[Key, Tensor]):
    """Gram matrices of one expert, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")
        names = self._file.keys()
        self._names = {(name.rpartition("|")[0], int(name.rpartition("|")[2])): name for name in names}

    def __getitem__(self, key: Key) -> Tensor:
        found: Tensor = self._file.get_tensor(self._names[key])
        return found

    def __iter__(self) -> Iterator[Key]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def store_grams(subject: Subject, inputs: Inputs, out: Path) -> StoredGrams:
    """Mean over tokens of `z z^T`, `I I`, for every matrix of the subject, of the model as it is."""
    measured = collect_unbound(subject.model, [dict(arguments) for _, arguments in inputs.batches])
    found, width = {}, measured.header.grams
    for name, block in subject.keys:
        key = next(iter(measured.header.places[name])).gram
        found[f"{name}|{block}"] = (
            unpack(measured.tensors[f"gram.{key}"](), width[key].width).float() / width[key].rows
        ).contiguous()
    save_file(found, out)
    return StoredGrams(out)
