"""Method `average`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lowrank import LowRank, weighted_sum
from actmat.methods._shared.per_expert import sum_problem, weights_and_sum
from actmat.methods.contract import MergeMethod, Weights
from actmat.methods.facets import MEAN_LAWS, Access, LowRankForm, Merged, MergedLowRank


def merge(deltas: Sequence[Tensor], *, weights: Weights = None) -> Merged:
    """Mean of the experts' deltas ("model soup").

        D* = sum_t w_t D_t / sum_t w_t

    All weights are 1 unless given. Used for every tensor that the chosen method does not act on.

    Raises:
        RecipeError: the weights sum to zero.

    Source:
        M. Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
        increasing inference time", ICML 2022, arXiv:2203.05482.

    >>> import torch
    >>> merge([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]).value.tolist()
    [2.0, 1.0]
    """
    share, total = weights_and_sum(weights, len(deltas))
    return Merged(one_pass_sum(deltas, share).div_(total))


def merge_lowrank(deltas: Sequence[LowRank], *, weights: Weights = None) -> MergedLowRank:
    """The same mean in factored form, of rank at most `sum_t R_t`; errors as in `merge`."""
    share, total = weights_and_sum(weights, len(deltas))
    return MergedLowRank(weighted_sum(deltas, [w / total for w in share]))


AVERAGE = MergeMethod(
    "average",
    merge,
    "elementwise",
    laws=MEAN_LAWS,
    lowrank=LowRankForm(merge_lowrank),
    access=Access(one_pass=True, baseless=True),
    weights_problem=lambda options, weights: sum_problem(weights),
)
