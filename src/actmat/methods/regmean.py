"""Method `regmean`."""

from __future__ import annotations

from typing import Annotated, Literal

from actmat.linalg.interference.rule import Fill, Filter, InterferenceRule
from actmat.methods._shared.interference import SHARED_LAWS, member
from actmat.methods.contract import Bounds, Fraction


def rule(
    *,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    off_diagonal: Fraction = 1.0,
    normalize: Literal["none", "trace"] = "none",
    prior: Annotated[float, Bounds(0)] = 0.0,
    ridge: Annotated[float, Bounds(0)] = 0.0,
    form: Literal["delta", "weight"] = "delta",
) -> InterferenceRule:
    """Least squares on every layer's outputs, from the Gram matrices of its inputs.

        D* = (sum_t w_t D_t G_t) (sum_t w_t G_t)^+,   G_t = E[z z^T]

    On each task's inputs `z` the merged layer should give the outputs of that task's expert; only the Gram matrix of
    the inputs is needed. The statistics "gram" are one `I x I` matrix per expert (uncentered; sums or means of tokens,
    alike for all). The base is used by `form="weight"` only. Weights are non-negative; they multiply `G_t`. The
    low-rank form costs `O(I^3)`, too. RegMean++ (T.-H. Nguyen et al., 2025, arXiv:2508.03121) is this method with Gram
    matrices collected on the activations of the already merged lower blocks: those of `actmat.staged_statistics`.

    Args:
        rtol: relative cut-off in units of the eigenvalues of the summed Gram; default `I * eps(float32)`.
        off_diagonal: factor on the off-diagonal entries of every Gram. 1 as in the ACTMat paper; 0.9 in the original.
        normalize: "trace" divides every Gram by its trace, so that experts with more or larger inputs do not lead.
        prior: share of ACTMat's estimate that is added to every Gram, `G_t + prior k_t D_t^T D_t` with `k_t` such that
            both traces agree. Of few inputs `n` per expert, 4 / n was best.
        ridge: in place of the cut-off, every direction is kept by `l / (l + ridge m)`, `l` its eigenvalue and `m` their
            mean, which needs no eigenvalues. `actmat merge --data` takes 0.001, with the prior.
        form: "delta" keeps the base weights in directions that no data reached. "weight", for study, solves for the
            weights `W_t` as first published: the same answer if the summed Gram is regular; otherwise it sets the
            weights in these directions to zero, base included.

    Raises:
        StatisticsError: no Gram matrices, or of the wrong number or shape.
        ValueError: a negative weight, `form="weight"` without the base or with a ridge.

    Source:
        X. Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023, arXiv:2212.09849.
    """
    fill: Fill = "minus_base" if form == "weight" else "zero"
    spectral = Filter("tikhonov", ridge=ridge) if ridge else Filter(rtol=rtol)
    return InterferenceRule(
        spectral=spectral, null=fill, off_diagonal=off_diagonal, per_trace=normalize == "trace", prior=prior
    )


REGMEAN = member(
    "regmean",
    rule,
    laws=SHARED_LAWS | {"left_orthogonal"},
    base=lambda options: options["form"] == "weight",
    has_grams=True,
)
