"""Method `model_stock`.

Shapes: `T` experts, `N` filters (rows), `I` entries of one filter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.chunks import SHORT_CHUNK, empty_result, shape_and_dtype
from actmat.linalg.inner import inner_products, inner_workspace, weighted_sum
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import MEAN_LAWS, Access, Combination, Merged, MethodCost

_SINGULAR = 1e-6
"""`|1 + (T - 1) cos|` below which opposing experts give no finite estimate; the filter then keeps the base."""


def merge(deltas: Sequence[Tensor], *, filter_wise: bool = False) -> Merged:
    """Mean delta, shrunk towards the base the more the experts disagree in direction.

        D* = t mean_t(D_t),   t = T c / (1 + (T - 1) c),
        c = mean cosine over all pairs of experts

    Base weights are not needed: interpolating `W_0` and the mean of the `W_t` is scaling the mean delta. A zero delta
    has cosine 0 with every other. One expert has no pair and is returned as it is.

    Args:
        filter_wise: one angle per vector along the last axis (an output unit) instead of one per tensor; a
            one-dimensional tensor is one filter.

    Source:
        D.-H. Jang, S. Yun, D. Han, "Model Stock: All we need is just a few fine-tuned models", ECCV 2024,
        arXiv:2403.19522.
    """
    if filter_wise and len(deltas) > 1 and len(shape_and_dtype(deltas)[0]) > 1:
        return _merge_filters(deltas)
    combination = combine(inner_products(deltas))
    return Merged(weighted_sum(deltas, combination.coefficients), combination.stats)


def combine(gram_TT: Tensor, *, filter_wise: bool = False) -> Combination:
    """The coefficients of a whole tensor, `t / T` for every expert."""
    count = len(gram_TT)
    if count == 1:
        return Combination([1.0], {"cosine": 1.0, "ratio": 1.0})
    cosine = _mean_cosine(gram_TT)
    ratio = float(_ratio(cosine, count))
    return Combination([ratio / count] * count, {"cosine": float(cosine), "ratio": ratio})


def _merge_filters(deltas: Sequence[Tensor]) -> Merged:
    """The merge of every vector along the last axis separately; one pass, a few filters at a time."""
    width = deltas[0].shape[-1]
    out = empty_result(deltas)
    filters = [d.reshape(-1, width) for d in deltas]
    into, step = out.view(-1, width), max(1, SHORT_CHUNK // max(1, width))
    cosine_sum = ratio_sum = 0.0
    for start in range(0, into.shape[0], step):
        piece_NTI = torch.stack([f[start : start + step] for f in filters], dim=1).double()
        cosine_N = _mean_cosine(piece_NTI @ piece_NTI.mT)
        ratio_N = _ratio(cosine_N, len(deltas))
        into[start : start + step] = piece_NTI.mean(dim=1) * ratio_N.unsqueeze(-1)
        cosine_sum += float(cosine_N.sum())
        ratio_sum += float(ratio_N.sum())
    count = max(1, into.shape[0])
    return Merged(out, {"cosine": cosine_sum / count, "ratio": ratio_sum / count})


def _mean_cosine(gram: Tensor) -> Tensor:
    """Mean over pairs `s < t` of the cosine, from inner products `*batch T T`."""
    count = gram.shape[-1]
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    product = norm.unsqueeze(-1) * norm.unsqueeze(-2)
    cosine = torch.where(product > 0, gram / product, 0.0).clamp(-1, 1)
    return cosine.triu(1).sum((-2, -1)) / (count * (count - 1) / 2)


def _ratio(cosine: Tensor, count: int) -> Tensor:
    """`T c / (1 + (T - 1) c)`, 0 where the denominator vanishes."""
    denominator = 1 + (count - 1) * cosine
    return count * cosine / torch.where(denominator.abs() < _SINGULAR, math.inf, denominator)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    entries = math.prod(shape)
    widest = max(SHORT_CHUNK, shape[-1] if shape else 1)
    filters = entries + 4 * n_experts * min(widest, max(1, entries))
    return filters if options["filter_wise"] else inner_workspace(entries, n_experts)


MODEL_STOCK = MergeMethod(
    "model_stock",
    merge,
    "tensor",
    laws=MEAN_LAWS,
    access=Access(streams=lambda options: not options["filter_wise"], walks_again=True),  # chunks end within filters
    cost=MethodCost(workspace=_workspace),
    combine=combine,
)
