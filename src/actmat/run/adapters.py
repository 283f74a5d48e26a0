"""A look at a few modules of LoRA adapters: how large their deltas are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import mean

import torch
from torch import Tensor

from actmat.errors import MergeError
from actmat.linalg.lowrank import orthogonal_core
from actmat.run.locate import Given

MODULES = 16
"""Modules that are read, drawn at random with a fixed seed: kinds of layers recur, and differ in size."""

Cores = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Core and bases of the factors of one module, per adapter; see `orthogonal_core`."""


def mean_size(given: Given) -> float | None:
    """Mean of `||D_t|| / ||W_0||` over modules and adapters; None for other inputs, and where the run will refuse."""
    sizes = measure_modules(
        given, lambda norm, cores: [float(core_RR.norm()) / norm for core_RR, _, _ in cores if norm]
    )
    return mean(sizes) if sizes else None


def measure_modules(given: Given, measure: Callable[[float, Cores], list[float]]) -> list[float]:
    """Values of all modules that are read, from the norm of the base's weight and the adapters' factors."""
    if given.base is None or not given.only_adapters or not given.have_factors:
        return []
    try:
        base, found = given.base.model(), list[float]()
        experts = [e.expert(base) for e in given.experts]
        names = [n for n, s in base.specs.items() if len(s.shape) == 2 and all(e.source(n).rank for e in experts)]
        for name in Random(0).sample(names, min(MODULES, len(names))):
            norm = float(torch.linalg.vector_norm(base.read(name).float()))
            shape = base.specs[name].shape
            found += measure(norm, [orthogonal_core(e.factors(name, shape, torch.float32)) for e in experts])
    except MergeError:  # the run opens the inputs again, and says what is wrong
        return []
    return found
