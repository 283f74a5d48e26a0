"""RegMean: least squares on the layers' outputs, from the Gram matrices of their inputs.

X. Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023. RegMean++ (T.-H. Nguyen
et al., 2025) is the same rule with Gram matrices collected on the activations of the already merged lower layers: what
changes is the statistics, not the solve, so it is this method fed with those.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal

from torch import Tensor

from actmat.errors import StatisticsError
from actmat.linalg import interference
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Rule, State
from actmat.linalg.interference_lowrank import solve_lowrank_with_grams
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod, Stages

__all__ = ["REGMEAN", "merge", "merge_lowrank"]

Form = Literal["delta", "weight"]
Statistics = Mapping[str, Sequence[Tensor]]


def _rule(
    rtol: float | None = None,
    off_diagonal: float = 1.0,
    normalise: Literal["none", "trace"] = "none",
    form: Form = "delta",
) -> Rule:
    del form  # a fill, chosen when the sums are there
    return Rule(spectral=Filter(rtol=rtol), off_diagonal=off_diagonal, per_trace=normalise == "trace")


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Statistics | None = None,
    base: Tensor | None = None,
    weights: Sequence[float] | None = None,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    off_diagonal: Annotated[float, Bounds(0, 1)] = 1.0,
    normalise: Literal["none", "trace"] = "none",
    form: Form = "delta",
) -> Merged:
    """`D* = (sum_t w_t D_t G_t) (sum_t w_t G_t)^+`, `G_t = E[z z^T]` of the layer's inputs on task `t`.

    Args:
        statistics: `"gram"`: one `I x I` matrix per expert (uncentred; sums or means over tokens, alike for all).
        base: `W_0`; used by `form="weight"` alone.
        weights: non-negative, one per expert; they multiply `G_t`.
        rtol: relative cut-off in units of the eigenvalues of the summed Gram; default `I * eps(float32)`.
        off_diagonal: factor on the off-diagonal entries of every Gram. 1 as in the ACTMat paper; 0.9 in the original.
        normalise: "trace" divides every Gram by its trace, so that experts with more or larger inputs do not lead.
        form: "delta" keeps the base weights in directions that no data reached. "weight", for study, solves for the
            weights `W_t` as first published: the same answer where the summed Gram is regular, but elsewhere it sets
            the weights to zero, base included.

    Raises:
        StatisticsError: no Gram matrices, or of the wrong number or shape.
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight, or `form="weight"` without the base.
    """
    rule = _rule(rtol, off_diagonal, normalise)
    state = interference.prepare(deltas, rule, weights=weights, grams=_grams(statistics))
    solution = interference.finish(state, rule, fill=_fill(form, base), consume=True)
    return Merged(solution.value, solution.stats)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    statistics: Statistics | None = None,
    base: Tensor | None = None,
    weights: Sequence[float] | None = None,
    rtol: float | None = None,
    off_diagonal: float = 1.0,
    normalise: Literal["none", "trace"] = "none",
    form: Form = "delta",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there. Still `O(I^3)`.

    Raises:
        ValueError: `form="weight"`: its answer takes the base away where no data reached, which is not low rank.
    """
    del base
    if form == "weight":
        raise ValueError(
            "form='weight' is not available for low-rank deltas: it removes the base weights from directions that no "
            "data reached, which is not a low-rank change. Merge the dense deltas, or take form='delta'."
        )
    rule = _rule(rtol, off_diagonal, normalise)
    value, stats = solve_lowrank_with_grams(deltas, _grams(statistics), rule, weights=weights)
    return MergedLowRank(value, stats)


def _grams(statistics: Statistics | None) -> Sequence[Tensor]:
    if statistics is None or "gram" not in statistics:
        found = "none" if not statistics else ", ".join(statistics)
        raise StatisticsError(
            f"RegMean needs statistics of kind 'gram', one input Gram matrix per expert; found {found}. Collect them "
            "on a few batches of each expert's data, or take a data-free method such as 'actmat'."
        )
    return statistics["gram"]


def _fill(form: Form, base: Tensor | None) -> tuple[Tensor, float] | None:
    """The weight form is the delta form with `N = -W_0`: `(sum W_t G_t) S^+ - W_0 = B S^+ - W_0 (I - S S^+)`."""
    if form == "delta":
        return None
    if base is None:
        raise ValueError("form='weight' works on the weights W_0 + D_t and needs the base; none was given")
    return base, -1.0


def _stages() -> Stages:
    def key(options: Mapping[str, Any]) -> Hashable:
        known = {n: v for n, v in options.items() if n not in ("weights", "statistics", "base")}
        weights = options.get("weights")
        return ("gram", _rule(**known).moments_key(), None if weights is None else tuple(weights))

    def prepare(
        deltas: Sequence[Tensor],
        *,
        statistics: Statistics | None = None,
        base: Tensor | None = None,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> State:
        del base
        return interference.prepare(deltas, _rule(**options), weights=weights, grams=_grams(statistics))

    def finish(
        state: State,
        *,
        statistics: Statistics | None = None,
        base: Tensor | None = None,
        weights: Sequence[float] | None = None,
        form: Form = "delta",
        **options: Any,
    ) -> Merged:
        del statistics, weights
        solution = interference.finish(state, _rule(**options), fill=_fill(form, base))
        return Merged(solution.value, solution.stats)

    return Stages(key=key, prepare=prepare, finish=finish)


REGMEAN = MergeMethod(
    name="regmean",
    merge=merge,
    acts_on="matrix",
    summary="Least squares on every layer's outputs, from the Gram matrices of its inputs.",
    equation="D* = (sum_t D_t G_t) (sum_t G_t)^+",
    reference="Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023",
    laws=frozenset({"permutation", "homogeneous", "odd", "left_orthogonal", "zeros"}),
    merge_lowrank=merge_lowrank,
    one_pass=True,
    needs_statistics=("gram",),
    base_when=lambda options: options["form"] == "weight",
    workspace=workspace_of(_rule, has_grams=True),
    flops="(T + 3) N^3",
    stages=_stages(),
)
