"""Method `ties`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.chunks import shape_and_dtype
from actmat.linalg.masks.election import ZeroSign, elect, sign_balance
from actmat.linalg.masks.mask import Trim, l1_factors, top_trims
from actmat.linalg.masks.threshold import Cut, StreamedCut
from actmat.methods._shared.per_expert import per_expert, workspace_of_election
from actmat.methods.contract import Fractions, MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost, Survey

Variant = Literal["original", "mergekit", "actmat"]
ZERO_SIGN: dict[Variant, ZeroSign] = {"original": "majority", "mergekit": "positive", "actmat": "zero"}


@dataclass(frozen=True, slots=True)
class GlobalTrim:
    """Thresholds and majority of the whole model, for `trim="global"`.

    Args:
        cuts: smallest magnitude that expert `t` keeps.
        kept: fraction of its entries that expert `t` keeps.
        majority: sign of the sum of all elected signs, each expert voting with weight 1; 0 unless the variant needs it.
    """

    cuts: tuple[float, ...]
    kept: tuple[float, ...]
    majority: int


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Weights = None,
    survey: GlobalTrim | None = None,
    density: Fractions = 0.2,
    trim: Literal["tensor", "global"] = "tensor",
    reduce: Literal["mean", "sum"] = "mean",
    rescale: Literal["none", "l1"] = "none",
    variant: Variant = "original",
) -> Merged:
    """Keep the largest entries of each delta, elect a sign per entry, average the entries that agree with it.

        y_t = w_t top_d(D_t);   s = sign(sum_t y_t)
        D* = sum_{t in A} y_t / sum_{t in A} w_t,   A = {t: sign(y_t) = s}

    Small changes count as noise, and opposite changes do not cancel. Public implementations differ in three details,
    which `variant` fixes together (`d` density, `N` entries), and in `trim`:

    | variant  | entries kept             | equal to the threshold | votes cancel exactly          |
    |----------|--------------------------|------------------------|-------------------------------|
    | original | `int(d N) + 1`           | all kept               | sign of the sum of all signs  |
    | mergekit | `int(d N)`, 1 at least   | exactly that many      | plus                          |
    | actmat   | `round(d N)`             | exactly that many      | entry becomes 0               |

    Args:
        weights: one per expert, applied after trimming and before the vote; 1 unless given.
        density: fraction of the entries of largest magnitude to keep; one for all experts, or a list.
        trim: "tensor" ranks the entries of each tensor, as most tools do; "global" those of the whole model, as the
            original does: layers that moved little lose nearly everything, and all entries equal to a threshold stay.
            It reads the inputs two or three times more.
        reduce: mean or sum of the agreeing entries (the divisor `sum w_t` is left out).
        rescale: `l1` gives each trimmed delta its L1 norm back, by one factor (mergekit's `rescale`); `none` leaves it.
        variant: implementation whose counting rule and tie-breaks apply, see the table of variants.

    Raises:
        RecipeError: `trim="global"` without a survey.

    Source:
        P. Yadav et al., "TIES-Merging: resolving interference when merging models", NeurIPS 2023, arXiv:2306.01708.
    """
    densities = per_expert("density", density, len(deltas))
    if trim == "global":
        if survey is None:
            raise RecipeError(
                "ties: trim='global' ranks the entries of a whole model, but this call sees one tensor and was given "
                "no survey of the model. Merge checkpoints, or use trim='tensor' for single tensors."
            )
        masks = [Trim.at(cut, shape_and_dtype(deltas)[1]) for cut in survey.cuts]
        fraction, majority = sum(survey.kept) / len(deltas), survey.majority
    else:
        (masks, fraction), majority = _trims_of_tensor(deltas, densities, variant), None
    share = scales = [1.0] * len(deltas) if weights is None else list(weights)
    if rescale == "l1":
        factors = l1_factors([delta.reshape(-1) for delta in deltas], masks)
        scales = [w * f for w, f in zip(share, factors, strict=True)]
    zero_sign = ZERO_SIGN[variant]
    value = elect(deltas, masks, scales=scales, counts=share, reduce=reduce, zero_sign=zero_sign, majority=majority)
    return Merged(value, {"kept_fraction": fraction})


def _trims_of_tensor(
    deltas: Sequence[Tensor], densities: Sequence[float], variant: Variant
) -> tuple[list[Trim], float]:
    """The entries of one tensor that each expert keeps, and their mean fraction."""
    total, exact = math.prod(shape_and_dtype(deltas)[0]), variant != "original"
    ranks = [[kept_entries(d, total, variant=variant)] for d in densities]
    trims = [trim for (trim,) in top_trims(deltas, ranks, exact=exact)]
    fraction = sum((c.rank / max(c.total, 1) if exact else c.fraction) / len(deltas) for _, c in trims)
    return [mask for mask, _ in trims], fraction


def kept_entries(density: float, total: int, *, variant: Variant) -> int:
    """Number of the `total` entries that a variant keeps; 0 for density 0, all for density 1."""
    if density <= 0 or density >= 1:
        return 0 if density <= 0 else total
    if variant == "actmat":
        return round(density * total)
    if variant == "mergekit":
        return min(total, max(1, int(density * total)))
    return min(total, int(density * total) + 1)


@dataclass(slots=True)
class TrimSurvey:
    """Rounds that find the thresholds, then one round of votes if canceled votes follow the majority."""

    selections: list[StreamedCut]
    wants_votes: bool
    votes_open: bool = False
    balance: int = 0

    @property
    def cuts(self) -> list[Cut]:
        """Thresholds found so far: those of all experts once the vote is open."""
        return [s.cut for s in self.selections if s.cut is not None]


def _start(n_experts: int, options: Mapping[str, Any]) -> TrimSurvey:
    variant: Variant = options["variant"]
    densities = per_expert("density", options["density"], n_experts)
    selections = [StreamedCut(partial(kept_entries, d, variant=variant)) for d in densities]
    return TrimSurvey(selections, wants_votes=ZERO_SIGN[variant] == "majority")


def _observe(state: TrimSurvey, deltas: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    if not state.votes_open:
        for selection, delta in zip(state.selections, deltas, strict=True):
            selection.observe(delta.reshape(-1))
        return
    state.balance += sign_balance(deltas, [Trim.at(c.value, deltas[0].dtype) for c in state.cuts])


def _fork(state: TrimSurvey) -> TrimSurvey:
    return replace(state, selections=[s.fork() for s in state.selections], balance=0)


def _join(state: TrimSurvey, other: TrimSurvey) -> None:
    for selection, theirs in zip(state.selections, other.selections, strict=True):
        selection.join(theirs)
    state.balance += other.balance


def _advance(state: TrimSurvey) -> bool:
    if state.votes_open:
        return False
    unfinished = [s.advance() for s in state.selections]
    state.votes_open = not any(unfinished)
    return any(unfinished) or state.wants_votes


def _finish(state: TrimSurvey) -> GlobalTrim:
    cuts = state.cuts
    return GlobalTrim(
        cuts=tuple(c.value for c in cuts),
        kept=tuple(c.fraction for c in cuts),
        majority=(state.balance > 0) - (state.balance < 0),
    )


SURVEY = Survey(lambda options: options["trim"] == "global", _start, _observe, _fork, _join, _advance, _finish)
"""Thresholds of a whole model, over as many passes as needed."""

TIES = MergeMethod(
    "ties",
    merge,
    "tensor",
    laws=frozenset({"permutation", "homogeneous", "odd", "zero_expert", "zeros"}),
    access=Access(
        # the survey of a whole model holds whole deltas; the norms of `rescale` are taken before the deltas are added
        streams=lambda options: options["trim"] == "tensor" and options["rescale"] == "none",
        walks_again=True,
    ),
    cost=MethodCost(workspace=workspace_of_election),
    survey=SURVEY,
    elsewhere=lambda options, n_experts: "mean" if options["reduce"] == "mean" else 1.0,
)
