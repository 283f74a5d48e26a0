"""Spaces in which the deltas of adapters can be merged, for any method: the core space, and the factors themselves.

    full      the method sees the deltas `D_t = b_t a_t`, dense or in an exact low-rank form of its own
    core      it sees `M_t = U^T b_t a_t V`, and `D* = U M V^T`: `U` and `V` are singular vectors of all `b_t` side by
              side and of all `a_t` one below the other
    factors   it sees `b_1 .. b_T`, then `a_1 .. a_T`, and `D* = b a`

Core space: A. Panariello et al., "Accurate and Efficient Low-Rank Model Merging in Core Space", NeurIPS 2025.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank, `P`, `Q` sides of the core, at most `sum_t R_t`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, core_bases
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import MergedLowRank
from actmat.methods.post.contract import Step, apply_steps, apply_steps_lowrank

Space = Literal["full", "core", "factors"]

ROTATIONS = frozenset({"left_orthogonal", "right_orthogonal"})
"""Laws of a method that is the same in every basis of the rows and of the columns."""


def merge_in_core(
    method: MergeMethod,
    deltas: Sequence[LowRank],
    needs: Mapping[str, Any],
    options: Mapping[str, Any],
    steps: Sequence[Step] = (),
) -> MergedLowRank:
    """`D* = U method(M_1 .. M_T) V^T` with `M_t = U^T b_t a_t V`, which loses nothing of any delta.

    Args:
        deltas: one per expert, in two dimensions, float64.
        needs, options: keyword arguments of the method.
        steps: matrix steps of post-processing, which act in the space.

    The inputs do not determine the singular vectors of a repeated singular value, nor the result of a method that looks
    at single entries in their basis. A change of their signs changes no method that treats plus and minus alike.
    """
    bases, retries = core_bases(deltas)
    cores = list(bases.cores_PQ)
    merged = method.merge(cores, **needs, **options)
    changed = apply_steps(merged.value, cores, steps)
    size = "x".join(map(str, cores[0].shape[-2:]))
    stats = {**merged.stats, **changed.stats, "core": size, **retry_stats(retries)}
    return MergedLowRank(bases.lift(changed.value), stats)


def merge_in_factors(
    method: MergeMethod,
    deltas: Sequence[LowRank],
    needs: Mapping[str, Any],
    options: Mapping[str, Any],
    steps: Sequence[Step] = (),
) -> MergedLowRank:
    """`D* = method(b_1 .. b_T) method(a_1 .. a_T)`: of the experts' rank, and with products `b_s a_t` of two experts.

    Each side gets the square root of an expert's weight, `a` its sign too. A random method draws for all `b_t` first,
    then for all `a_t`. Zero deltas may have a lower rank than the others.
    """
    on_b, on_a = dict(needs), dict(needs)
    if needs.get("weights") is not None:
        on_b["weights"] = [math.sqrt(abs(w)) for w in needs["weights"]]
        on_a["weights"] = [math.copysign(root, w) for root, w in zip(on_b["weights"], needs["weights"], strict=True)]
    rank, pad = max(d.rank for d in deltas), torch.nn.functional.pad
    b = method.merge([pad(d.b_OR, (0, rank - d.rank)) for d in deltas], **on_b, **options)
    a = method.merge([pad(d.a_RI, (0, 0, 0, rank - d.rank)) for d in deltas], **on_a, **options)
    changed = apply_steps_lowrank(LowRank(b.value, a.value), deltas, steps)
    sides = {f"{side}_{name}": value for side, part in (("b", b), ("a", a)) for name, value in part.stats.items()}
    return MergedLowRank(changed.value, {**sides, **changed.stats})


MERGE_IN: Mapping[Space, Callable[..., MergedLowRank]] = {"core": merge_in_core, "factors": merge_in_factors}
"""Merges of the deltas of one matrix in spaces other than the full one, which has the method's own forms."""


def space_problems(space: Space, method: MergeMethod, options: Mapping[str, Any]) -> list[str]:
    """Reasons why a method cannot work in a space, one sentence each without a full stop."""
    if space == "full":
        return []
    problems = []
    where = f"'space: {space}'"
    if method.uses_base(options):
        problems.append(f"{where}: method '{method.name}' looks at the base's weights, which have no part in it")
    if method.needs_statistics:
        kinds = ", ".join(method.needs_statistics)
        problems.append(f"{where}: method '{method.name}' takes statistics ({kinds}), which belong to the full space")
    if method.survey is not None and method.survey.applies(options):
        problems.append(
            f"{where}: method '{method.name}' wants a pass over the whole model with these options, and surveys see "
            "full deltas; rank within each tensor instead (-o trim=tensor)"
        )
    if space == "factors" and method.acts_on == "matrix":
        problems.append(
            f"{where}: method '{method.name}' acts on linear maps, and a factor is half of one; take 'space: core', or "
            "a method on entries such as ties, dare or linear"
        )
    return problems


def space_words(space: Space, method: MergeMethod, options: Mapping[str, Any]) -> str:
    """Words for the plan: in which space a method works, and whether that changes its result."""
    if space == "full":
        return ""
    if space == "factors":
        return " of A and of B apart (not the rule on deltas: their product mixes experts)"
    sums = method.combine is not None or (method.lowrank is not None and method.acts_on == "elementwise")
    if sums and not method.uses_base(options):
        return " in the core space (equal to the full space)"
    if method.lowrank is not None and method.laws >= ROTATIONS:
        return " in the core space (equal to the full space but for counts of its sides)"
    return " in the core space (another result than in the full space: the rule depends on the basis)"
