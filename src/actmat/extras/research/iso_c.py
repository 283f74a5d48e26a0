"""Method `iso_c`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of a factor pair, `P, Q` ranks of the common bases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lapack import retry_stats
from actmat.linalg.singular import SpectrumMean, isotropic
from actmat.linalg.svd import RANK_RTOL, svd_workspace
from actmat.methods._shared.per_matrix import KnownShape, in_cores
from actmat.methods.contract import Fraction, MergeMethod, Weights
from actmat.methods.facets import SUM_LAWS, Access, Merged, MethodCost

NullFill = Literal["zero", "fill"]

_FULL_RANK = (
    'iso_c: null="fill" gives a matrix of full rank, which has no low-rank form; merge the dense deltas, or leave null '
    'at "zero"'
)


def merge(
    deltas: Sequence[Tensor],
    shape: KnownShape = None,
    *,
    weights: Weights = None,
    mean: SpectrumMean = "all",
    null: NullFill = "zero",
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Sum of the deltas, all its singular values replaced by their mean.

        sum_t w_t D_t = U diag(s) V^T,   D* = mean(s) U V^T

    Directions that only one task uses are no longer drowned by those that all share.

    **Rank-deficient sums.** Let `r < p = min(O, I)` be the rank of the sum. The published mean is over all `p` values,
    and LAPACK's `U V^T` includes `p - r` null-space pairs that the sum does not determine: the published answer is the
    sum of a determined part, `c U_r V_r^T`, and an arbitrary isometry of norm `c sqrt(p - r)` between the null spaces.
    With `null="zero"`, the default, the result is only the determined part: the same `c`, the same action on the column
    and row space of the sum, and the base weights untouched beyond them. It has the rank of the sum, obeys the
    orthogonal laws, and has an exact low-rank form. With full rank there is nothing to choose and it is the published
    rule. `null="fill"` adds the arbitrary part as well, for comparison with published numbers.

    Args:
        mean: "all" divides the sum of the singular values by `min(O, I)`, as published; "rank" by the numerical rank;
            "rms" takes the root of their mean square over `min(O, I)`, so that at full rank the norm of the sum stays.
        null: "zero" keeps the null directions of a rank-deficient sum at zero; "fill" gives them the mean singular
            value along the singular vectors that LAPACK returns, which the input does not determine.
        rtol: singular values at or below `rtol` times the largest one count as zero.

    Source:
        D. Marczak, S. Magistri, S. Cygert, B. Twardowski, A. D. Bagdanov, J. van de Weijer, "No Task Left Behind:
        Isotropic Model Merging with Common and Task-Specific Subspaces", ICML 2025, arXiv:2502.04959.
    """
    total_OI = one_pass_sum(deltas, [1.0] * len(deltas) if weights is None else weights)
    directions = min((shape or total_OI.shape)[-2:])
    value_OI, polar = isotropic(total_OI, directions, mean=mean, complete=null == "fill", rtol=rtol)
    rank = {"rank_min": int(polar.rank.min()), "rank_max": int(polar.rank.max())}
    return Merged(value_OI.to(total_OI.dtype), {"directions": directions, **rank, **retry_stats(polar.retries)})


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    # The sum, the factor times its level in float64, the result; `svd_workspace` covers the polar factor.
    return math.prod(batch) * (4 * rows * columns + svd_workspace(rows, columns))


ISO_C = MergeMethod(
    "iso_c",
    merge,
    "matrix",
    laws=SUM_LAWS,
    lowrank=in_cores(merge, refused=("null", "fill", _FULL_RANK)),
    access=Access(one_pass=True),
    cost=MethodCost(workspace=_workspace, products=lambda options: (0, 5)),
    elsewhere=lambda options, n_experts: "share",  # the authors' mean; the weights are factors in the method
)
