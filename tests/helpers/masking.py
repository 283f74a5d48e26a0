"""Deltas with the awkward features that masks meet, and naive forms of the rules, entry by entry in float64."""

import math
from collections.abc import Sequence

import torch
from tests.helpers import survey
from tests.helpers.spectra import seeded
from torch import Tensor

from actmat.methods import MergeMethod


def awkward_deltas(n_experts: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Multiples of 1/8 in a small range: many equal magnitudes, zeros, exact cancellations, both signs."""
    draws = torch.randint(-12, 13, (n_experts, *shape), generator=seeded(seed))
    return list((draws / 8).to(dtype))


def naive_top(delta: Tensor, k: int, *, exact: bool) -> Tensor:
    """Keep the k largest magnitudes: by a stable sort; without `exact`, all that equal the k-th too."""
    flat = delta.reshape(-1)
    order = sorted(range(flat.numel()), key=lambda i: (-abs(float(flat[i])), i))
    keep = set(order[:k])
    if not exact and k > 0:
        last = abs(float(flat[order[min(k, len(order)) - 1]]))
        keep = {i for i in order if abs(float(flat[i])) >= last}
    out = torch.zeros_like(flat)
    for i in keep:
        out[i] = flat[i]
    return out.view(delta.shape)


def naive_elect(
    votes: Sequence[Tensor], counts: Sequence[float], *, reduce: str, zero_sign: str, majority: int | None = None
) -> Tensor:
    """TIES' election and disjoint mean, one entry at a time."""
    columns = torch.stack([v.reshape(-1) for v in votes]).T.tolist()
    signs = [_sign(math.fsum(column)) for column in columns]
    of_all = _sign(sum(signs)) if majority is None else majority
    out = []
    for column, found in zip(columns, signs, strict=True):
        sign = found or {"majority": of_all, "positive": 1, "zero": 0}[zero_sign]
        agreeing = [t for t, y in enumerate(column) if sign != 0 and _sign(y) == sign]
        total = math.fsum(column[t] for t in agreeing)
        divisor = math.fsum(counts[t] for t in agreeing) if reduce == "mean" else 1.0
        out.append(total / (divisor or 1.0))
    return torch.tensor(out, dtype=votes[0].dtype).view(votes[0].shape)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def call(method: MergeMethod, deltas: Sequence[Tensor], *, seed: int = 0, **given: object) -> Tensor:
    """The rule with defaults overlaid by `given`; a random rule gets a fresh generator."""
    needs = {name: given.pop(name) for name in list(given) if name in method.needs}
    return survey.call(method, deltas, method.resolve_options(given), seed=seed, **needs).value
