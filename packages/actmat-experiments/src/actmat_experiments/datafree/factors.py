"""Factors of low-rank experts with the values that `A` started from, which the seed of the training gives again.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.extras.demo.training import generator_for
from actmat_experiments.forecast.models import Factors
from actmat_experiments.vision.train import with_adapter

_FILE = "factors-{}.safetensors"


def save_factors(factors: Mapping[str, Factors], folder: Path) -> None:
    """One file per task."""
    for task, some in factors.items():
        named = {(*key, part): t for key, three in some.items() for part, t in zip("bas", three, strict=True)}
        tensors = {f"{name}|{block}|{part}": t.contiguous() for (name, block, part), t in named.items()}
        save_file(tensors, folder / _FILE.format(task))


def read_factors(folder: Path, task: str) -> Factors:
    """Factors as `save_factors` has written them."""
    tensors = load_file(folder / _FILE.format(task))
    keys = dict.fromkeys(name.rsplit("|", 1)[0] for name in tensors)
    found = {}
    for key in keys:
        name, block = key.split("|")
        b, a, start = (tensors[f"{key}|{part}"] for part in "bas")
        found[name, int(block)] = (b, a, start)
    return found


def peft_factors(base: Any, expert: Path, rank: int, seed: int, task: str) -> Factors:
    """Factors of an adapter of the vision suites; the start is drawn again as its training did, see `with_adapter`.

    Args:
        base: the model without adapter; it is changed.
    """
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    trained = load_file(expert / "adapter_model.safetensors")
    started: dict[str, Tensor] = {
        name.removeprefix(prefix).replace(".lora_A.default.weight", ""): parameter.detach()
        for name, parameter in with_adapter(base, rank, generator_for(seed, f"factors {task}")).named_parameters()
        if name.endswith(".lora_A.default.weight")
    }
    names = [n.removeprefix(prefix).removesuffix(suffix) for n in trained if n.endswith(suffix)]
    return {
        (f"{n}.weight", 0): (trained[f"{prefix}{n}.lora_B.weight"], trained[f"{prefix}{n}{suffix}"], started[n])
        for n in names
    }
