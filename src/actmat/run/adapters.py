"""A look at modules of LoRA adapters: how large their deltas are, and whether they started from one `A`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from statistics import mean, median

import torch

from actmat.errors import MergeError
from actmat.experts.locate import fit_expert, require_model
from actmat.experts.lora.adapter import Adapter
from actmat.linalg.lapack import economy_svd
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.run.locate import Located

MODULES = 16
"""Modules that are read of larger models, drawn at random with a fixed seed: kinds of layers recur, and differ in
size. Sixteen miss the mean of all by 4 to 8 %."""
ALL_BELOW = 150_000_000
"""Weights that are all read: in about a second."""


def size_and_overlap(located: Located) -> tuple[float | None, float] | None:
    """Mean of `||D_t|| / ||W_0||` over modules and adapters, and the overlap of the adapters' `A`.

    The overlap is the median cosine of the principal angles between the row spaces of each adapter and the next: near 1
    where all started from one `A`, 0 for one adapter. Without a base the size is None. None for other inputs, and where
    the run will refuse.
    """
    if not located.only_adapters or not located.have_factors:
        return None
    sizes, cosines = list[float](), list[float]()
    try:
        for norm, factors in _modules(located):
            cores = [orthogonal_core(f) for f in factors]
            sizes += [float(core_RR.norm()) / norm for core_RR, _, _ in cores if norm]
            cosines += [c for a, b in pairwise(cores) for c in economy_svd(a[2].mT @ b[2]).s_R.tolist()]
    except MergeError:  # the run opens the inputs again, and says what is wrong
        return None
    return (mean(sizes) if sizes else None, median(cosines or [0.0])) if sizes or cosines else None


def modules_differ(located: Located) -> bool:
    """Whether adapters do not all change the same modules."""
    return len({frozenset(e.modules) for e in located.experts if isinstance(e, Adapter)}) > 1


def _modules(located: Located) -> Iterator[tuple[float, list[LowRank]]]:
    """Norm of the weights, 0 without a base, and the adapters' factors, of modules that all adapters change: of all
    where they are small, else of a few.
    """
    if located.base is None:
        adapters = [e for e in located.experts if isinstance(e, Adapter)]
        shapes = [{n: m.shape for n, m in a.modules.items() if not m.is_stack} for a in adapters]
        for name in _few([n for n, shape in shapes[0].items() if all(s.get(n) == shape for s in shapes)]):
            yield 0.0, [a.factors(a.modules[name], torch.float32) for a in adapters]
        return
    base = require_model(located.base)
    experts = [fit_expert(e, base) for e in located.experts]
    specs = {n: s for n, s in base.specs.items() if len(s.shape) == 2 and all(e.source(n).rank for e in experts)}
    is_small = sum(math.prod(s.shape) for s in specs.values()) <= ALL_BELOW
    for name in list(specs) if is_small else _few(list(specs)):
        weight_OI = base.tensors.read(name).float()
        yield float(weight_OI.norm()), [e.factors(name, weight_OI.shape, torch.float32) for e in experts]


def _few(names: Sequence[str]) -> list[str]:
    return Random(0).sample(names, min(MODULES, len(names)))
