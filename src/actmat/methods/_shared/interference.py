"""What the files of the interference family share: from a `Rule` to the parts of a `MergeMethod`.

Each file of the family holds a function `_rule(**options) -> Rule` and builds everything from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from actmat.linalg import interference
from actmat.linalg.interference import Rule, State
from actmat.linalg.interference_lowrank import solve_lowrank
from actmat.linalg.interference_workspace import workspace
from actmat.linalg.lowrank import LowRank
from actmat.methods.contract import Merged, MergedLowRank, Stages

__all__ = ["merge_rule", "merge_rule_lowrank", "stages_of", "workspace_of"]

RuleOf = Callable[..., Rule]


def merge_rule(deltas: Sequence[Tensor], rule: Rule, weights: Sequence[float] | None) -> Merged:
    """The dense merge: one pass over the deltas, the result written over the accumulated numerator."""
    state = interference.prepare(deltas, rule, weights=weights)
    solution = interference.finish(state, rule, consume=True)
    return Merged(solution.value, solution.stats)


def merge_rule_lowrank(deltas: Sequence[LowRank], rule: Rule, weights: Sequence[float] | None) -> MergedLowRank:
    """The same answer in factored form."""
    return MergedLowRank(*solve_lowrank(deltas, rule, weights=weights))


def stages_of(rule_of: RuleOf) -> Stages:
    """Two-stage form. Equal keys mean equal states, between methods of the family too.

    Both stages take all options of the rule, and `weights`. A state belongs to one thread: the first `finish` that
    needs the eigendecomposition stores it there for the others.
    """

    def prepare(deltas: Sequence[Tensor], *, weights: Sequence[float] | None = None, **options: Any) -> State:
        return interference.prepare(deltas, rule_of(**options), weights=weights)

    def finish(state: State, *, weights: Sequence[float] | None = None, **options: Any) -> Merged:
        del weights  # they are in the sums
        solution = interference.finish(state, rule_of(**options))
        return Merged(solution.value, solution.stats)

    return Stages(key=_key_of(rule_of), prepare=prepare, finish=finish)


def _key_of(rule_of: RuleOf) -> Callable[[Mapping[str, Any]], Any]:
    def key(options: Mapping[str, Any]) -> Any:
        rule = rule_of(**{name: value for name, value in options.items() if name != "weights"})
        weights = options.get("weights")
        return (rule.moments_key(), None if weights is None else tuple(weights))

    return key


def workspace_of(rule_of: RuleOf, *, has_grams: bool = False) -> Callable[[Sequence[int], int, Mapping[str, Any]], int]:
    """`MergeMethod.workspace` of a member of the family."""

    def elements(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
        return workspace(shape, n_experts, rule_of(**options), has_grams=has_grams)

    return elements
