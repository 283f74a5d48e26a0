"""A look at a few modules of LoRA adapters: how large their deltas are, and whether their `A` started alike.

Shapes: `I` in_features, `R` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import mean, median

import torch

from actmat.errors import MergeError
from actmat.linalg.lowrank import orthogonal_core
from actmat.run.locate import Given

MODULES = 16
"""Modules that are read, drawn at random with a fixed seed: kinds of layers recur, and differ in size."""
SHARED, APART = 0.9, 0.5
"""Overlap above which adapters started from one `A`, and below which from different ones."""


@dataclass(frozen=True)
class AdapterLook:
    """Measures of the factors.

    Args:
        size: mean of `||D_t|| / ||W_0||` over modules and adapters.
        overlap: median cosine of the principal angles between the row spaces of two adapters; 1 if all are the same.
    """

    size: float
    overlap: float


def look_at(given: Given) -> AdapterLook | None:
    """The look at adapters with a base; None for other inputs, and for those that the run will refuse."""
    if given.base is None or not given.only_adapters or not given.have_factors:
        return None
    try:
        base = given.base.model()
        experts = [e.expert(base) for e in given.experts]
        names = [n for n, s in base.specs.items() if len(s.shape) == 2 and all(e.source(n).rank for e in experts)]
        sizes, overlaps = list[float](), list[float]()
        for name in Random(0).sample(names, min(MODULES, len(names))):
            norm = float(torch.linalg.vector_norm(base.read(name).float()))
            cores = [orthogonal_core(e.factors(name, base.specs[name].shape, torch.float32)) for e in experts]
            sizes += [float(core_RR.norm()) / norm for core_RR, _, _ in cores if norm]
            for (_, _, one_IR), (_, _, other_IR) in combinations(cores, 2):
                overlaps += torch.linalg.svdvals(one_IR.mT @ other_IR).tolist()
    except MergeError:  # the run opens the inputs again, and says what is wrong
        return None
    return AdapterLook(mean(sizes), median(overlaps)) if sizes and overlaps else None
