"""Method `adamerging`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import SUM_LAWS, Access, Merged


def merge(deltas: Sequence[Tensor], *, coefficients: list[float] | None = None, initial: float = 0.3) -> Merged:
    """Sum of the deltas with coefficients learned, without labels, to make predictions certain.

        D* = sum_t c_t D_t,   c = argmin of the entropy of the predictions

    The coefficients are learned elsewhere: with the authors' code, or any training loop that runs the model with the
    merged weights on unlabeled inputs.

    Args:
        coefficients: one per expert; the same for all tensors (task-wise), or by a rule per tensor (layer-wise).
        initial: every coefficient where none are given, which is where training starts.

    Source:
        E. Yang et al., "AdaMerging: adaptive model merging for multi-task learning", ICLR 2024, arXiv:2310.02575.
    """
    share = [initial] * len(deltas) if coefficients is None else coefficients
    if len(share) != len(deltas):
        raise ValueError(f"adamerging: {len(share)} coefficients for {len(deltas)} experts; give one per expert")
    return Merged(one_pass_sum(deltas, share))


ADAMERGING = MergeMethod(
    "adamerging",
    merge,
    "tensor",
    laws=SUM_LAWS,
    access=Access(one_pass=True),
    elsewhere=lambda options, n_experts: "own",
)
