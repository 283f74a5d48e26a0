"""Method `task_arithmetic`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lowrank import LowRank, weighted_sum
from actmat.methods.contract import MergeMethod, Weights
from actmat.methods.facets import SUM_LAWS, Access, LowRankForm, Merged, MergedLowRank


def merge(deltas: Sequence[Tensor], *, weights: Weights = None, scaling: float = 0.4) -> Merged:
    """Scaled sum of the experts' deltas.

        D* = scaling sum_t w_t D_t

    A sum keeps every task's change at the same strength, at the price of a merged model that moved further from the
    base than any expert.

    Args:
        scaling: lambda; 0.4 is the usual choice without validation data.

    Source:
        G. Ilharco et al., "Editing models with task arithmetic", ICLR 2023, arXiv:2212.04089.
    """
    share = [1.0] * len(deltas) if weights is None else weights
    return Merged(one_pass_sum(deltas, share).mul_(scaling))


def merge_lowrank(deltas: Sequence[LowRank], *, weights: Weights = None, scaling: float = 0.4) -> MergedLowRank:
    """The same sum in factored form: `[scaling w_1 b_1, ...] @ [a_1; ...]`, of rank `sum_t R_t` at most."""
    share = [1.0] * len(deltas) if weights is None else weights
    return MergedLowRank(weighted_sum(deltas, [scaling * w for w in share]))


TASK_ARITHMETIC = MergeMethod(
    "task_arithmetic",
    merge,
    "elementwise",
    laws=SUM_LAWS,
    lowrank=LowRankForm(merge_lowrank),
    access=Access(one_pass=True),
    elsewhere=lambda options, n_experts: "own",
)
