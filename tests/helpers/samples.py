"""Small stored inputs for `ExecutorConformance`: checkpoints with statistics, and LoRA adapters.

Shapes: `N` samples, `I` and `O` features in and out, `R` rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.helpers import merging
from tests.helpers.checkpoint_files import save_folder, save_lora
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.extras.collect.files import write_statistics
from actmat.statistics.header import DataInfo, GramInfo, GramOf, ModelInfo, StatisticsHeader, content_hash

RANK = 2
CONFIG = merging.CONFIG | {"tie_word_embeddings": True}
BASE = merging.llama_tensors(3)
LINEAR = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in BASE.items() if "_proj" in name}
"""Linear layers: name -> (out_features, in_features)."""


@dataclass(frozen=True)
class Samples:
    """Inputs of a merge in a folder.

    Args:
        folder: holds them all.
        base: location of the base, or None.
        experts: locations of the experts.
        statistics: of the experts, if there are any.
    """

    folder: Path
    base: Path | None
    experts: tuple[Path, ...]
    statistics: tuple[Path, ...] = ()

    @classmethod
    def checkpoints(cls, folder: Path, *, statistics: bool = False, constant: float | None = None) -> Samples:
        """Store a base and two full checkpoints.

        Args:
            folder: an existing folder.
            statistics: collect statistics of the experts too.
            constant: value of all entries of the experts; the base is then zero.
        """
        base, tuned = BASE, [merging.expert_of(BASE, t) for t in range(2)]
        if constant is not None:
            base, expert = ({n: torch.full_like(x, c) for n, x in BASE.items()} for c in (0.0, constant))
            tuned = [expert] * 2
        experts = [_save_checkpoint(folder / f"expert{t}", tensors) for t, tensors in enumerate(tuned)]
        measured = tuple(_measure(e, folder / f"statistics{t}", t) for t, e in enumerate(experts) if statistics)
        return cls(folder, _save_checkpoint(folder / "base", base), tuple(experts), measured)

    @classmethod
    def adapters(cls, folder: Path) -> Samples:
        """Store a base and two LoRA adapters."""
        experts = tuple(_save_adapter(folder / f"adapter{t}", seed=1000 * (t + 1)) for t in range(2))
        return cls(folder, _save_checkpoint(folder / "base", BASE), experts)

    def recipe(self) -> dict[str, Any]:
        """The fields of a recipe that name the inputs, and a method."""
        measured: tuple[Path | None, ...] = self.statistics or (None,) * len(self.experts)
        experts = [
            {"path": str(e)} | ({} if s is None else {"statistics": str(s)})
            for e, s in zip(self.experts, measured, strict=True)
        ]
        return {"base": "" if self.base is None else str(self.base), "experts": experts, "method": "actmat"}

    def damage(self) -> list[str]:
        """Write NaN into three tensors of full checkpoints; their names."""
        names = [f"{name}.weight" for name in LINEAR][:3]
        for t, name in enumerate(names):
            file = self.experts[t % len(self.experts)] / "model.safetensors"
            tensors = load_file(file)
            tensors[name].flatten()[t] = math.nan
            save_file(tensors, file, {"format": "pt"})
        return names


def _save_checkpoint(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Store tensors, the embedding under its tied name too."""
    return save_folder(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, CONFIG)


def _save_adapter(folder: Path, seed: int) -> Path:
    """Store an adapter as PEFT does."""
    modules = {
        name: (_random(seed + 2 * i, RANK, columns), _random(seed + 2 * i + 1, rows, RANK))
        for i, (name, (rows, columns)) in enumerate(LINEAR.items())
    }
    return save_lora(
        folder, modules, task_type="CAUSAL_LM", target_modules=sorted({n.rpartition(".")[2] for n in LINEAR})
    )


def _measure(checkpoint: Path, out: Path, seed: int) -> Path:
    """Store the Gram matrices of a checkpoint's layers on random samples, each as its lower triangle."""
    samples_NI = _random(seed, 32, max(merging.WIDTH, merging.INNER)).double()
    packed = {}
    for name, (_, width) in LINEAR.items():
        gram_II = samples_NI[:, :width].mT @ samples_NI[:, :width]
        packed[f"{name}.weight"] = gram_II[tuple(torch.tril_indices(width, width))]
    count = len(samples_NI)
    hashes = {name: content_hash(tensor) for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    grams = {
        f"{name}.weight": GramInfo(width=width, rows=count, hash=content_hash(packed[f"{name}.weight"]))
        for name, (_, width) in LINEAR.items()
    }
    header = StatisticsHeader(
        model=ModelInfo(location=str(checkpoint), content=hash_names(hashes.items()), tensors=hashes),
        data=[DataInfo(source="random", fingerprint=content_hash(samples_NI), samples=count, tokens=count)],
        samples=count,
        tokens=count,
        grams=grams,
        places={name: [GramOf(gram=name)] for name in grams},
    )
    specs = [TensorSpec(f"gram.{name}", tuple(half.shape), "float64", "") for name, half in packed.items()]
    write_statistics(out, header, specs, lambda name: packed[name.removeprefix("gram.")])
    return out


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
