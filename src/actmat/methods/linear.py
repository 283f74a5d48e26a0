"""Method `linear`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lowrank import LowRank, weighted_sum
from actmat.methods._shared.per_expert import sum_problem, weights_and_sum
from actmat.methods.contract import MergeMethod, Weights
from actmat.methods.facets import MEAN_LAWS, Access, LowRankForm, Merged, MergedLowRank

_SCALES_THE_BASE = (
    "linear: normalize=False is not available for low-rank deltas: it scales the base weights too, which is not a "
    "low-rank change"
)


def merge(
    deltas: Sequence[Tensor], *, weights: Weights = None, base: Tensor | None = None, normalize: bool = True
) -> Merged:
    """Weighted mean of the experts; without normalization, weighted sum of their weights.

        W* = sum_t w_t W_t / sum_t w_t

    In deltas that is `D* = sum_t w_t D_t / sum_t w_t`, the `linear` of LLM merging tools.

    Args:
        normalize: divide by the sum of the weights. Without it the weights of the experts, not their deltas, are
            summed: `D* = sum_t w_t D_t + (sum_t w_t - 1) W_0`, which also scales the base. `task_arithmetic` with
            `scaling=1` is the sum of deltas.

    Raises:
        RecipeError: weights that sum to zero, or `normalize=False` without the base.

    Source:
        C. Goddard et al., "Arcee's MergeKit: a toolkit for merging large language models", EMNLP 2024 (industry track),
        arXiv:2403.13257.
    """
    share, divisor = weights_and_sum(weights, len(deltas), is_mean=normalize)
    total = one_pass_sum(deltas, share)
    if normalize:
        return Merged(total.div_(divisor))
    if base is None:
        raise RecipeError(
            "linear: normalize=False sums the experts' weights and so needs the base tensor, but none was given. "
            "Pass the base, or use task_arithmetic with scaling=1 to sum deltas."
        )
    return Merged(total.add_(base, alpha=divisor - 1))


def merge_lowrank(
    deltas: Sequence[LowRank], *, weights: Weights = None, base: Tensor | None = None, normalize: bool = True
) -> MergedLowRank:
    """The same sum in factored form, of rank `sum_t R_t` at most; not with `normalize` off (ValueError)."""
    if not normalize:
        raise ValueError(f"{_SCALES_THE_BASE}. Use task_arithmetic with scaling=1 to sum deltas.")
    share, total = weights_and_sum(weights, len(deltas))
    return MergedLowRank(weighted_sum(deltas, [w / total for w in share]))


LINEAR = MergeMethod(
    "linear",
    merge,
    "elementwise",
    laws=MEAN_LAWS,
    lowrank=LowRankForm(merge_lowrank, why_not=lambda options, *_: None if options["normalize"] else _SCALES_THE_BASE),
    access=Access(
        one_pass=True,
        base=lambda options: not options["normalize"],
        moves_base=lambda options: not options["normalize"],
        baseless=True,
    ),
    weights_problem=lambda options, weights: sum_problem(weights) if options["normalize"] else None,
    elsewhere=lambda options, n_experts: "mean" if options["normalize"] else "own",
)
