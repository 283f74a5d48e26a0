"""Lengths of a merged delta that need no data: factors of the whole model's `D*`.

All are computed from inner products summed over the layers. Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class Inner:
    """Sums over layers: `merged = ||D*||^2`, `own[t] = ||D_t||^2`, `cross[t] = <D*, D_t>`, `mean = ||mean_t D_t||^2`.

    `seen_cross` and `seen_merged` are sums over experts of inner products in the metric `D_t^T D_t / ||D_t||^2`.
    """

    def __init__(self, n: int) -> None:
        self.merged = self.mean = self.seen_cross = self.seen_merged = 0.0
        self.own, self.cross = [0.0] * n, [0.0] * n

    @property
    def agreement(self) -> float:
        """`T ||mean D||^2 / mean ||D_t||^2`: 1 for orthogonal deltas, `T` for equal ones."""
        n = len(self.own)
        return n * self.mean / max(sum(self.own) / n, 1e-300)


def inner(merged_OI: Mapping[object, Tensor], deltas_OI: Sequence[Mapping[object, Tensor]]) -> Inner:
    """The sums of one merge."""
    found = Inner(len(deltas_OI))
    for key, star_OI in merged_OI.items():
        own = [d[key].float() for d in deltas_OI]
        found.merged += float(star_OI.square().sum())
        found.mean += float(torch.stack(own).mean(0).square().sum())
        for t, d in enumerate(own):
            norm = float(d.square().sum())
            found.own[t] += norm
            found.cross[t] += float((star_OI * d).sum())
            if norm > 0:
                through_OO, itself_OO = star_OI @ d.mT, d @ d.mT
                found.seen_merged += float(through_OO.square().sum()) / norm
                found.seen_cross += float((through_OO * itself_OO).sum()) / norm
    return found


def _projected(x: Inner) -> float:
    """Least squares to all experts with inputs of all directions alike: `sum_t <D*, D_t> / (T ||D*||^2)`."""
    return sum(x.cross) / (len(x.own) * max(x.merged, 1e-300))


LENGTHS: Mapping[str, Callable[[Inner], float]] = {
    "one": lambda x: 1.0,
    "average": lambda x: math.sqrt(x.mean / max(x.merged, 1e-300)),
    "mean expert": lambda x: math.sqrt(sum(x.own) / len(x.own) / max(x.merged, 1e-300)),
    "projection": _projected,
    "own inputs": lambda x: x.seen_cross / max(x.seen_merged, 1e-300),
    "half way": lambda x: math.sqrt(max(_projected(x), 0.0) * max(x.seen_cross / max(x.seen_merged, 1e-300), 0.0)),
    "signal": lambda x: _projected(x) * math.sqrt(len(x.own) / max(x.agreement, 1e-300)),
}
"""Rule -> factor of `D*`.

| rule | factor |
|---|---|
| one | 1 |
| average | length of the average, `||mean_t D_t|| / ||D*||` |
| mean expert | length of an expert, `rms_t ||D_t|| / ||D*||` |
| projection | least squares, all directions of inputs alike: `sum_t <D*, D_t> / (T ||D*||^2)` |
| own inputs | least squares, inputs of expert t as in `D_t^T D_t / ||D_t||^2` |
| half way | geometric mean of the two |
| signal | projection, longer by `sqrt(T / agreement)`, see `Inner`: what a mean of unrelated deltas lost |
"""
