"""Steps of post-processing: changes of every merged matrix after its method, through its singular values or its norm.

A step is a pure function of one merged matrix and the experts' deltas of it, in a dense form and in an exact form on
factors. Options are the keyword-only parameters of the dense form, whose docstring describes the step, as for a method.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` singular directions, `P`, `Q` sides of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.errors import RecipeError, did_you_mean
from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.linalg.singular import Polar, SpectrumMean, isotropic
from actmat.linalg.svd import ThinSVD, thin_svd
from actmat.methods.contract import (
    Bounds,
    Description,
    Fraction,
    Option,
    overlay_options,
    parse_description,
    read_options,
)
from actmat.methods.facets import Merged, MergedLowRank

StepStats = dict[str, float | int | str]


@dataclass(frozen=True)
class PostStep:
    """Declaration of one step.

    Args:
        apply: `(merged, deltas, *, <options>) -> Merged` of one `*batch O I` matrix.
        apply_lowrank: the same on factors, exact, without forming an `O x I` matrix.
    """

    name: str
    apply: Callable[..., Merged]
    apply_lowrank: Callable[..., MergedLowRank]

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Options by name, in the order of the signature."""
        return read_options(self.name, self.apply)

    @cached_property
    def text(self) -> Description:
        """Description of the step, from its docstring."""
        return parse_description(self.apply.__doc__ or "")

    def resolve_options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid with `given`; RecipeError with all problems."""
        return overlay_options(f"post-processing '{self.name}'", self.options, chosen)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of post-processing with all its options."""

    name: str
    options: Mapping[str, Any]


def apply_steps(value: Tensor, deltas: Sequence[Tensor], steps: Sequence[Step]) -> Merged:
    """Apply the steps in order, and join their records."""
    stats: dict[str, Any] = {}
    for step in steps:
        changed = get_step(step.name).apply(value, deltas, **step.options)
        value, stats = changed.value, {**stats, **changed.stats}
    return Merged(value, stats)


def apply_steps_lowrank(value: LowRank, deltas: Sequence[LowRank], steps: Sequence[Step]) -> MergedLowRank:
    """The same on factors, in float64."""
    stats: dict[str, Any] = {}
    for step in steps:
        changed = get_step(step.name).apply_lowrank(value, deltas, **step.options)
        value, stats = changed.value, {**stats, **changed.stats}
    return MergedLowRank(value, stats)


def boost(merged: Tensor, deltas: Sequence[Tensor], *, beta: Fraction = 0.01) -> Merged:
    """Raise the small singular values of the merged delta to the one at which the largest reach beta of their sum.

        D = U diag(s) V^T;   D* = U diag(max(s, s_k)) V^T,
        k the first index with (s_1 + .. + s_k) / sum(s) >= beta

    The more experts are merged, the fewer directions hold most of the merged delta. Null directions stay null: the
    matrix does not determine the vectors that span them.

    Args:
        deltas: unused.
        beta: share of the sum of the singular values up to the one that the smaller are raised to. With 0.01 that is
            `s_1` wherever `s_1` exceeds 1 % of the sum: all values become the largest.

    Source:
        "Subspace Boosting" for model merging, 2025, arXiv:2506.16506.

    >>> import torch
    >>> boost(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), [], beta=0.6).value.diagonal()
    tensor([4., 3., 3., 3.])
    """
    svd = thin_svd(merged)
    raised_K, stats = _raised(svd, beta)
    value = (svd.u_OK * raised_K.unsqueeze(-2)) @ svd.v_IK.mT
    return Merged(value.to(merged.dtype), stats)


def boost_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, beta: float = 0.01) -> MergedLowRank:
    """The same on factors: only nonzero directions of the product are raised. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    core = thin_svd(core_PQ)
    raised_K, stats = _raised(core, beta)
    value = LowRank(left_OP @ (core.u_OK * raised_K.unsqueeze(-2)), (right_IQ @ core.v_IK).mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), stats)


def _raised(svd: ThinSVD, beta: float) -> tuple[Tensor, StepStats]:
    """Singular values with the small ones raised, zeros left at zero, and the record."""
    s_K = svd.s_K
    if not s_K.shape[-1] or not bool(s_K.any()):
        return s_K, {"boosted": 0}
    share_K = s_K.cumsum(-1) / s_K.sum(-1, keepdim=True).clamp_min(torch.finfo(s_K.dtype).tiny)
    # rounding may leave the last share below 1
    first = (share_K < beta).sum(-1, keepdim=True).clamp_max(s_K.shape[-1] - 1)
    level = s_K.gather(-1, first)
    on_K = s_K > 0
    raised_K = torch.where(on_K, torch.maximum(s_K, level), s_K)
    boosted = int((raised_K > s_K).sum())
    return raised_K, {"boosted": boosted, "boosted_to": float(level.max()), **retry_stats(svd.retries)}


def isotropize(merged: Tensor, deltas: Sequence[Tensor], *, mean: SpectrumMean = "all") -> Merged:
    """Replace all singular values of the merged delta by their mean.

        D = U diag(s) V^T;   D* = mean(s) U V^T

    The last step of `iso_c`, after any method. Null directions stay null.

    Args:
        deltas: unused.
        mean: "all" divides the sum of the singular values by `min(O, I)`, in the core space by the smaller side of the
            core; "rank" by the numerical rank; "rms" takes the root of their mean square over `min(O, I)`.

    Source:
        D. Marczak et al., "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces", ICML
        2025, arXiv:2502.04959; A. Panariello et al., "Accurate and Efficient Low-Rank Model Merging in Core Space",
        NeurIPS 2025, arXiv:2509.17786.

    >>> import torch
    >>> isotropize(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), []).value
    tensor([[2., 0.],
            [0., 2.]])
    """
    value, polar = isotropic(merged, min(merged.shape[-2:]), mean=mean)
    return Merged(value.to(merged.dtype), _isotropize_stats(polar))


def isotropize_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, mean: SpectrumMean = "all") -> MergedLowRank:
    """The same on factors; the mean is over `min(O, I)` of the full shape. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    value_PQ, polar = isotropic(core_PQ, min(merged.shape[-2:]), mean=mean)
    value = LowRank(left_OP @ value_PQ, right_IQ.mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), _isotropize_stats(polar))


def _isotropize_stats(polar: Polar) -> StepStats:
    return {"isotropic_rank": int(polar.rank.max()), **retry_stats(polar.retries)}


def at_mean_norm(merged: Tensor, deltas: Sequence[Tensor]) -> Merged:
    """Give every merged matrix the mean norm of the experts' deltas.

        D* = D mean_t ||D_t|| / ||D||

    The mean is over the experts that change the matrix; a zero delta stays zero.

    Source:
        The last step of Pico: Y. Tang, Y. Yang, "Crowded in B-Space: Calibrating Shared Directions for LoRA Merging",
        2026, arXiv:2604.16826.

    >>> import torch
    >>> at_mean_norm(torch.tensor([[3.0, 4.0]]), [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])]).value.norm()
    tensor(2.)
    """
    return _at_mean(merged, deltas)


def at_kappa(merged: Tensor, deltas: Sequence[Tensor], *, kappa: Annotated[float, Bounds(low=0)] = 1.15) -> Merged:
    """Give every merged matrix kappa times the root mean square of the norms of the experts' deltas.

        D* = D kappa sqrt(mean_t ||D_t||^2) / ||D||

    The mean is over the experts that change the matrix; a zero delta stays zero.

    Args:
        kappa: 1.15 for experts whose sizes differ by less than a factor of 3.5; 0.5 was published for 16-fold.

    Source:
        "CORAM", 2026, arXiv:2608.17366.

    >>> import torch
    >>> at_kappa(torch.tensor([[3.0, 4.0]]), [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 7.0]])]).value.norm()
    tensor(5.7500)
    """
    return _at_mean(merged, deltas, kappa, power=2)


def _at_mean(merged: Tensor, deltas: Sequence[Tensor], kappa: float = 1.0, power: int = 1) -> Merged:
    """Give every merged matrix `kappa` times the power mean of the norms of the deltas."""
    gain = kappa * _to_mean([torch.linalg.matrix_norm(m.to(torch.float64)) for m in (merged, *deltas)], power)
    return Merged(merged * gain[..., None, None].to(merged.dtype), _gain_stats(gain))


def _at_mean_lowrank(merged: LowRank, deltas: Sequence[LowRank], kappa: float = 1.0, power: int = 1) -> MergedLowRank:
    """The same on factors, whose `b` takes the gain. Exact, in float64."""
    gain = kappa * _to_mean([torch.linalg.matrix_norm(orthogonal_core(m)[0]) for m in (merged, *deltas)], power)
    b_OR = merged.b_OR * gain[..., None, None].to(merged.b_OR.dtype)
    return MergedLowRank(LowRank(b_OR, merged.a_RI), _gain_stats(gain))


def _to_mean(norms: Sequence[Tensor], power: int) -> Tensor:
    """Power mean of the nonzero norms except the first, divided by the first; 1 if the first is zero."""
    norm, of_deltas = norms[0], torch.stack(list(norms[1:]))
    mean = ((of_deltas**power).sum(0) / (of_deltas > 0).sum(0).clamp(min=1)) ** (1 / power)
    return torch.where(norm > 0, mean / norm.clamp(min=torch.finfo(torch.float64).tiny), 1.0)


def _gain_stats(gain: Tensor) -> StepStats:
    return {"gain_min": float(gain.min()), "gain_max": float(gain.max())}


STEPS: Mapping[str, PostStep] = {
    step.name: step
    for step in (
        PostStep("isotropize", isotropize, isotropize_lowrank),
        PostStep("kappa", at_kappa, partial(_at_mean_lowrank, power=2)),
        PostStep("mean_norm", at_mean_norm, _at_mean_lowrank),
        PostStep("subspace_boosting", boost, boost_lowrank),
    )
}


def get_step(name: str) -> PostStep:
    """The step called `name`.

    Raises:
        RecipeError: no such step; the message suggests a similar name and lists all.

    >>> get_step("isotropize").options["mean"].default
    'all'
    """
    if name in STEPS:
        return STEPS[name]
    raise RecipeError(
        f"Unknown post-processing step '{name}'.{did_you_mean(name, STEPS)} Known steps: {', '.join(STEPS)}"
    )
