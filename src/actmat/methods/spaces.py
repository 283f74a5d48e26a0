"""Spaces in which the deltas of adapters can be merged: the core space, the factors themselves, calibrated factors.

    full      the method sees the deltas `D_t = b_t a_t`, dense or in an exact low-rank form of its own
    core      it sees `M_t = U^T b_t a_t V`, and `D* = U M V^T`: `U` and `V` are singular vectors of all `b_t` side by
              side and of all `a_t` one below the other
    factors   it sees `b_1 .. b_T`, then `a_1 .. a_T`, and `D* = b a`
    pico      it sees `S b_t a_t`, where `S` damps output directions that the `b_t` share, and `D*` gets the mean norm
              of the experts' deltas

Core space: A. Panariello et al., "Accurate and Efficient Low-Rank Model Merging in Core Space", NeurIPS 2025.
Pico: Y. Tang and Y. Yang, "Crowded in B-Space: Calibrating Shared Directions for LoRA Merging", 2026, arXiv:2604.16826.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank, `P`, `Q` sides of the core, at most `sum_t R_t`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from actmat.linalg.lapack import economy_svd, retry_stats
from actmat.linalg.lowrank import LowRank, core_bases, frobenius_norm
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import MergedLowRank
from actmat.methods.post import Step, apply_steps, apply_steps_lowrank

Space = Literal["full", "core", "factors", "pico"]
Arguments = Mapping[str, Any]

KEEP_ROWS: frozenset[Space] = frozenset({"full", "pico"})
"""Spaces in which a method sees every delta with its own row space."""

ROTATIONS = frozenset({"left_orthogonal", "right_orthogonal"})
"""Laws of a method that is the same in every basis of the rows and of the columns."""


def merge_in_core(
    method: MergeMethod, deltas: Sequence[LowRank], arguments: Arguments, steps: Sequence[Step] = ()
) -> MergedLowRank:
    """`D* = U method(M_1 .. M_T) V^T` with `M_t = U^T b_t a_t V`, which preserves every delta exactly.

    Args:
        deltas: one per expert, in two dimensions, float64.
        arguments: of the method, needs and options.
        steps: matrix steps of post-processing, which act in the space.

    The inputs do not determine the singular vectors of a repeated singular value, nor the result of an elementwise
    method in their basis. A change of their signs changes no method that treats plus and minus alike.
    """
    bases, retries = core_bases(deltas)
    cores = list(bases.cores_PQ)
    merged = method.merge(cores, **arguments)
    changed = apply_steps(merged.value, cores, steps)
    size = "x".join(map(str, cores[0].shape[-2:]))
    stats = {**merged.stats, **changed.stats, "core": size, **retry_stats(retries)}
    return MergedLowRank(bases.lift(changed.value), stats)


def merge_in_factors(
    method: MergeMethod, deltas: Sequence[LowRank], arguments: Arguments, steps: Sequence[Step] = ()
) -> MergedLowRank:
    """`D* = method(b_1 .. b_T) method(a_1 .. a_T)`: of the experts' rank, and with products `b_s a_t` of two experts.

    Each side gets the square root of an expert's weight, `a` its sign too. A random method draws for all `b_t` first,
    then for all `a_t`. Zero deltas may have a lower rank than the others.
    """
    on_b, on_a, weights = dict(arguments), dict(arguments), arguments.get("weights")
    if weights is not None:
        on_b["weights"] = [math.sqrt(abs(w)) for w in weights]
        on_a["weights"] = [math.copysign(math.sqrt(abs(w)), w) for w in weights]
    rank, pad = max(d.rank for d in deltas), torch.nn.functional.pad
    b = method.merge([pad(d.b_OR, (0, rank - d.rank)) for d in deltas], **on_b)
    a = method.merge([pad(d.a_RI, (0, 0, 0, rank - d.rank)) for d in deltas], **on_a)
    changed = apply_steps_lowrank(LowRank(b.value, a.value), deltas, steps)
    sides = {f"{side}_{name}": value for side, part in (("b", b), ("a", a)) for name, value in part.stats.items()}
    return MergedLowRank(changed.value, {**sides, **changed.stats})


def merge_calibrated(
    method: MergeMethod, deltas: Sequence[LowRank], arguments: Arguments, steps: Sequence[Step] = ()
) -> MergedLowRank:
    """`D* = g method(S b_1 a_1, .., S b_T a_T)`, with less of the output directions that many experts share.

        [b_1 .. b_T] = U diag(s) V^T,   c = s^2 / sum s^2,
        S = I + U (diag(1 / (1 + (T - 1) c)) - I) U^T

    and `g = mean_t ||D_t|| / ||D||` for the merged delta `D`. `T` counts the experts that have
    a delta; a single one is not changed. `S` depends on the norms of the columns of `b_t`: `(b g, a / g)` is the same
    delta with another share. Cost `O(O R'^2)` with `R' = sum_t R_t` on top of the method's.
    """
    present = [d for d in deltas if bool(d.b_OR.any()) and bool(d.a_RI.any())]
    if not present:
        return MergedLowRank(deltas[0], {})
    svd = economy_svd(torch.cat([d.b_OR for d in present], dim=-1))
    shares_R = svd.s_R.square() / svd.s_R.square().sum()
    damping_R = 1 / (1 + (len(present) - 1) * shares_R)
    calibrated = [LowRank(d.b_OR + svd.u_MR @ ((damping_R - 1)[:, None] * (svd.u_MR.mT @ d.b_OR)), d.a_RI)
                  for d in deltas]  # fmt: skip
    assert method.lowrank is not None, "methods without a form on factors are refused"
    merged = method.lowrank.merge(calibrated, **arguments)
    changed = apply_steps_lowrank(merged.value, calibrated, steps)
    stats = {**merged.stats, **changed.stats, "least_damping": float(damping_R.min()), **retry_stats(svd.retries)}
    norm = frobenius_norm(changed.value)
    if norm == 0:
        return MergedLowRank(changed.value, stats)
    gain = sum(map(frobenius_norm, present)) / len(present) / norm
    return MergedLowRank(LowRank(changed.value.b_OR * gain, changed.value.a_RI), {**stats, "gain": gain})


MERGE_IN: Mapping[Space, Callable[..., MergedLowRank]] = {
    "core": merge_in_core,
    "factors": merge_in_factors,
    "pico": merge_calibrated,
}
"""Merges of the deltas of one matrix in spaces other than the full one, which has the method's own forms."""


def space_problems(space: Space, method: MergeMethod, options: Mapping[str, Any], n_experts: int) -> list[str]:
    """Reasons why a method cannot work in a space, one sentence each without a full stop."""
    if space == "full":
        return []
    problems = []
    where = f"'space: {space}'"
    if method.uses_base(options):
        problems.append(f"{where}: method '{method.name}' reads the base's weights, which do not exist in this space")
    if method.needs_statistics:
        kinds = ", ".join(method.needs_statistics)
        problems.append(f"{where}: method '{method.name}' takes statistics ({kinds}), which belong to the full space")
    if method.survey is not None and method.survey.applies(options):
        problems.append(
            f"{where}: method '{method.name}' needs a pass over the whole model with these options, and surveys see "
            "full deltas; rank within each tensor instead (-o trim=tensor)"
        )
    if space == "pico" and (why_dense := method.why_dense(options, n_experts)):
        problems.append(
            f"{where}: only factors are calibrated, and {why_dense}; use a method that merges factors, such as "
            "dc_merge, cart, tsv or average"
        )
    if space == "factors" and method.acts_on == "matrix":
        problems.append(
            f"{where}: method '{method.name}' acts on linear maps, and a factor is half of one; use 'space: core', or "
            "a method on entries such as ties, dare or linear"
        )
    return problems


def space_words(space: Space, method: MergeMethod, options: Mapping[str, Any]) -> str:
    """Text for the plan: the space in which a method works, and whether this changes its result."""
    if space == "full":
        return ""
    if space == "factors":
        return " of A and of B apart (unlike the method on deltas: their product mixes experts)"
    if space == "pico":
        return " of deltas whose shared output directions are damped (Pico) and given the experts' mean norm"
    sums = method.combine is not None or (method.lowrank is not None and method.acts_on == "elementwise")
    if sums and not method.uses_base(options):
        return " in the core space (equal to the full space)"
    if method.lowrank is not None and method.laws >= ROTATIONS:
        return " in the core space (equal to the full space except for counts of its sides)"
    return " in the core space (not the result of the full space: the method depends on the basis)"
