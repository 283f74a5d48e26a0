r"""Lengths of the merged delta without data: per layer, per direction, per expert.

    actmat experiment run text-minilm --data DATA --cache CACHE --lora --no-full --seeds 0,1,2 \
        --methods average,benchmarks/evidence/lengths.py:average_layer,benchmarks/evidence/lengths.py:shares
    python -m benchmarks.evidence --cache CACHE

One factor for a whole model is a compromise between tasks. These methods give every matrix the mean norm of the
experts' deltas (`*_layer`), keep whole what one expert has alone and once what several share (`directions`), or give
every expert the same share of its own delta (`shares`). They are rows of the evidence and not methods of the package:
docs/evidence.md has what came of them. Deltas are dense and two-dimensional here; float64 inside.

Shapes: `T` experts, `O` out_features, `I` in_features, `J` directions of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from actmat.linalg.svd import thin_svd
from actmat.methods import MergeMethod, get_method
from actmat.methods.facets import About, Merged

SOURCE = "this file"


def mean_norm(deltas: Sequence[Tensor]) -> float:
    """`mean_t ||D_t||`."""
    return sum(float(torch.linalg.norm(d)) for d in deltas) / len(deltas)


def at_mean_norm(value_OI: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """The same direction, as long as a mean expert's delta; zero stays zero.

    >>> at_mean_norm(torch.tensor([[3.0, 4.0]]), [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])]).norm()
    tensor(2.)
    """
    norm = float(torch.linalg.norm(value_OI))
    return value_OI * (mean_norm(deltas) / norm) if norm else value_OI


def per_layer(method: str, deltas: Sequence[Tensor]) -> Merged:
    """`D* mean_t ||D_t|| / ||D*||` in every matrix, for the merged delta `D*` of a method."""
    merged = get_method(method).merge(deltas)
    return Merged(at_mean_norm(merged.value, deltas), merged.stats)


def per_direction(deltas: Sequence[Tensor], *, rescale: bool = False) -> Merged:
    """`D* = (sum_t D_t) U diag(1 / max(1, l)) U^T + (sum_t D_t)(I - U U^T)`, `sum_t P_t = U diag(l) U^T`.

    `P_t` projects on the row space of `D_t`. A direction that one expert has alone has `l = 1`, one that `k` experts
    share has `l = k` and is counted once.
    """
    wide = [d.to(torch.float64) for d in deltas]
    v_IJ = torch.cat([thin_svd(d).v_IK for d in wide], dim=1)
    u_IJ, s_J, _ = torch.linalg.svd(v_IJ, full_matrices=False)
    total_OI = torch.stack(wide).sum(0)
    change_J = 1 / s_J.square().clamp(min=1) - 1
    value_OI = total_OI + ((total_OI @ u_IJ) * change_J) @ u_IJ.mT
    return Merged((at_mean_norm(value_OI, wide) if rescale else value_OI).to(deltas[0].dtype))


def per_expert(deltas: Sequence[Tensor]) -> Merged:
    """`D* = sum_s w_s D_s` with `tr(D_t^T D*) = a ||D_t||^2` for every `t`, of the mean norm."""
    flat_TN = torch.stack([d.to(torch.float64).flatten() for d in deltas])
    gram_TT = flat_TN @ flat_TN.mT
    weights_T = torch.linalg.pinv(gram_TT, hermitian=True) @ gram_TT.diagonal()
    value_OI = (weights_T @ flat_TN).reshape(deltas[0].shape)
    return Merged(at_mean_norm(value_OI, deltas).to(deltas[0].dtype))


def _method(name: str, merge: Callable[..., Merged], summary: str, formula: str) -> MergeMethod:
    return MergeMethod(name, merge, "matrix", About(summary, formula, SOURCE))


def _layer(method: str) -> MergeMethod:
    return _method(f"{method}_layer", partial(per_layer, method), f"{method}, every matrix at the mean norm.",
                   "D mean ||D_t|| / ||D||")  # fmt: skip


average_layer, actmat_layer, tsv_layer = _layer("average"), _layer("actmat"), _layer("tsv")
dc_merge_layer, cart_layer = _layer("dc_merge"), _layer("cart")
directions = _method("directions", per_direction, "What experts share, once; the rest whole.", "(sum D_t) f(sum P_t)")
directions_layer = _method("directions_layer", partial(per_direction, rescale=True),
                           "The same at the mean norm of every matrix.", "g (sum D_t) f(sum P_t)")  # fmt: skip
shares = _method("shares", per_expert, "The same share of every expert's own delta.", "sum w_t D_t")
