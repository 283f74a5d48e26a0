r"""RobustMerge, as its authors' code has it, for a row of the evidence.

    actmat experiment run text-minilm --data DATA --cache CACHE --lora --no-full --seeds 0,1,2 \
        --methods average,benchmarks/evidence/robust.py:robustmerge

F. Zeng et al., "RobustMerge: Parameter-Efficient Model Merging for MLLMs with Direction Robustness", NeurIPS 2025,
arXiv:2502.17159. It merges the stored factors and not the deltas: `(B g, A / g)` is the same adapter and gives another
merge, and products `B_s A_t` of two experts come in. So it is no method of the package; docs/evidence.md has what it
gave.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods import MergeMethod
from actmat.methods.facets import About, LowRankForm, Merged, MergedLowRank

KEPT, RAISED, FACTOR = 0.2, 0.8, 2.0
"""Share of the entries of a factor that are kept; quantile to which smaller scales are raised; factor of both sums."""


def dense(deltas: Sequence[Tensor]) -> Merged:
    """Refuse: a delta does not tell its factors."""
    raise RecipeError("robustmerge merges factors; these experts are no plain LoRA of one rank.")


def trimmed(factors_TMN: Tensor) -> Tensor:
    """The `KEPT` largest entries of every factor, by magnitude, and zeros.

    >>> trimmed(torch.tensor([[[1.0, -5.0, 2.0, 3.0, 0.0]]])).tolist()
    [[[0.0, -5.0, 0.0, 3.0, 0.0]]]
    """
    size_TN = factors_TMN.abs().flatten(1)
    least_T = size_TN.kthvalue(int(size_TN.shape[1] * (1 - KEPT)), dim=1).values
    return factors_TMN * (factors_TMN.abs() >= least_T[:, None, None])


def factored(deltas: Sequence[LowRank]) -> MergedLowRank:
    """`B* A*` with `A* = 2 sum_t trim(A_t)` and `B* = 2 sum_t trim(B_t) diag(s_t) / sum_t s_t`.

    `s_t = |A_t| 1 / |trim(A_t)| 1`, row by row; the smallest four fifths of the `R` scales are raised to the next one.
    """
    a_TRI, b_TOR = torch.stack([d.a_RI for d in deltas]), torch.stack([d.b_OR for d in deltas])
    kept_TRI = trimmed(a_TRI)
    left_TR = kept_TRI.abs().sum(-1)
    s_TR = torch.where(left_TR > 0, a_TRI.abs().sum(-1) / left_TR, 1.0)  # infinite in the authors' code
    least_T1 = s_TR.sort(dim=1).values[:, int(s_TR.shape[1] * RAISED), None]
    s_TR = torch.maximum(s_TR, least_T1)
    b_OR = FACTOR * (trimmed(b_TOR) * s_TR[:, None, :]).sum(0) / s_TR.sum(0)
    return MergedLowRank(LowRank(b_OR, FACTOR * kept_TRI.sum(0)), {})


robustmerge = MergeMethod(
    "robustmerge",
    dense,
    "matrix",
    About("Trimmed sums of the factors, rows scaled.", "B* A*", "Zeng et al., RobustMerge, NeurIPS 2025"),
    lowrank=LowRankForm(factored),
)
