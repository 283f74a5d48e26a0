"""A look at a few modules of LoRA adapters: how large their deltas are, and whether they started from one `A`."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean, median

import torch

from actmat.errors import MergeError
from actmat.linalg.lowrank import orthogonal_core
from actmat.run.locate import Given

MODULES = 16
"""Modules that are read, drawn at random with a fixed seed: kinds of layers recur, and differ in size."""


def size_and_overlap(given: Given) -> tuple[float, float] | None:
    """Mean of `||D_t|| / ||W_0||` over modules and adapters, and the overlap of the adapters' `A`.

    The overlap is the median cosine of the principal angles between the row spaces of each adapter and the next: near 1
    where all started from one `A`, 0 for one adapter. None for other inputs, and where the run will refuse.
    """
    if given.base is None or not given.only_adapters or not given.have_factors:
        return None
    sizes, cosines = list[float](), list[float]()
    try:
        base = given.base.model()
        experts = [e.expert(base) for e in given.experts]
        names = [n for n, s in base.specs.items() if len(s.shape) == 2 and all(e.source(n).rank for e in experts)]
        for name in Random(0).sample(names, min(MODULES, len(names))):
            norm = float(torch.linalg.vector_norm(base.read(name).float()))
            cores = [orthogonal_core(e.factors(name, base.specs[name].shape, torch.float32)) for e in experts]
            sizes += [float(core_RR.norm()) / norm for core_RR, _, _ in cores if norm]
            cosines += [c for a, b in pairwise(cores) for c in torch.linalg.svdvals(a[2].mT @ b[2]).tolist()]
    except MergeError:  # the run opens the inputs again, and says what is wrong
        return None
    return (mean(sizes), median(cosines or [0.0])) if sizes else None
