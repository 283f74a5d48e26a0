"""The interference family as methods: one function from options to an `InterferenceRule` gives every form of a member.

`member` declares the dense merge, the low-rank merge, the two stages that variants share, and their cost; the options
are read from that function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from actmat.errors import StatisticsError
from actmat.linalg.interference import cost, solver
from actmat.linalg.interference.descent import Adam, Descent, accumulate, descend
from actmat.linalg.interference.rule import InterferenceRule, Null, Solver, weights_problem
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.per_expert import given_base
from actmat.methods.contract import NEEDS, Bounds, MergeMethod, Weights
from actmat.methods.facets import Access, Law, LowRankForm, Merged, MergedLowRank, MethodCost, Stages, When

SHARED_LAWS: frozenset[Law] = frozenset({"permutation", "homogeneous", "odd", "zeros"})
"""Laws of every member."""

RelativeCutoff = Annotated[
    float | None,
    Bounds(0, 1),
    "relative cut-off in units of the eigenvalues of `S`; default `I * eps(float32)`, in float64 too.",
]
FillOption = Annotated[Null, "what fills the filtered-out directions: nothing, the sum, or the mean of the deltas."]
SolverOption = Annotated[Solver, "which exact form to use, see `actmat`."]

RuleOf = Callable[..., InterferenceRule | Adam]
"""A function from options (keyword-only parameters) to the member that they choose."""

_ADAM_NEEDS_ENTRIES = (
    "optimizer='adam' is not available for low-rank deltas: Adam scales each entry of the O x I matrix separately, "
    "which the factors do not show"
)
_TRIM_NEEDS_ENTRIES = (
    "option 'trim' is not available for low-rank deltas: it selects single entries of the O x I matrix, which the "
    "factors do not show"
)
_FILL_IS_DENSE = (
    "form='weight' is not available for low-rank deltas: it removes the base weights from directions that no data "
    "reached, which is not a low-rank change"
)


def member(
    name: str,
    rule_of: RuleOf,
    laws: frozenset[Law],
    *,
    has_grams: bool = False,
    base: When = False,
    preset_of: str | None = None,
) -> MergeMethod:
    """Declare a member of the family.

    Args:
        rule_of: its options -> the rule. Its docstring is that of the method.
        has_grams: Gram matrices (`statistics`) replace the estimates.
        base: the base is a parameter, read under these options; see `Access`.
    """
    family = _Family(rule_of, has_grams)
    takes = (("statistics",) if has_grams else ()) + (("base",) if base else ()) + ("weights",)
    return MergeMethod(
        name,
        family.merge,
        "matrix",
        laws=laws,
        declared_by=rule_of,
        takes=takes,
        lowrank=LowRankForm(family.merge_lowrank, why_not=family.lowrank_problem, meets_all=family.meets_all),
        access=Access(one_pass=True, base=base),
        cost=MethodCost(
            family.cost_of(cost.workspace),
            products=lambda options: cost.products(rule_of(**options)),
            side=family.cost_of(cost.side),
        ),
        needs_statistics=("gram",) if has_grams else (),
        stages=Stages(family.key, family.prepare, family.finish),
        weights_problem=family.weights_problem,
        preset_of=preset_of,
    )


def preset(rule_of: RuleOf, laws: frozenset[Law], of: str = "actmat", *, has_grams: bool = False) -> MergeMethod:
    """Declare a member with the name of its function, as a preset of the member `of`."""
    return member(rule_of.__name__, rule_of, laws, has_grams=has_grams, preset_of=of)


@dataclass(frozen=True, slots=True)
class _Family:
    """All forms of one member. Each takes the needs and options `given`, and ignores unused needs."""

    rule_of: RuleOf
    has_grams: bool

    def rule(self, arguments: Mapping[str, Any]) -> InterferenceRule | Adam:
        """The rule that the options in `given` choose."""
        return self.rule_of(**{name: value for name, value in arguments.items() if name not in NEEDS})

    def merge(self, deltas: Sequence[Tensor], **arguments: Any) -> Merged:
        """Both stages, the result written over the accumulated numerator."""
        return self._solved(self.prepare(deltas, **arguments), arguments, consume=True)

    def merge_lowrank(self, deltas: Sequence[LowRank], **arguments: Any) -> MergedLowRank:
        """The same answer in factored form, of rank at most `sum_t R_t`."""
        rule, weights = self.rule(arguments), arguments.get("weights")
        if problem := _why_dense(rule, weights):
            raise ValueError(f"{problem}. Merge the dense deltas, or use other options.")
        assert isinstance(rule, InterferenceRule), "Adam has no low-rank form"
        if self.has_grams:
            grams, roots = _grams(arguments), arguments["statistics"].get("root")
            return MergedLowRank(*solver.solve_lowrank_with_grams(deltas, grams, rule, weights=weights, roots=roots))
        return MergedLowRank(*solver.solve_lowrank(deltas, rule, weights=weights))

    def lowrank_problem(self, options: Mapping[str, Any], n_experts: int, weights: Weights) -> str | None:
        """See `LowRankForm.why_not`."""
        return _why_dense(self.rule_of(**options), weights)

    def weights_problem(self, options: Mapping[str, Any], weights: Sequence[float]) -> str | None:
        """See `MergeMethod`."""
        rule = self.rule_of(**options)
        return weights_problem(weights) if isinstance(rule, Adam) else rule.weights_problem(weights)

    def key(self, arguments: Mapping[str, Any]) -> Hashable:
        """See `Stages`. Equal keys mean equal states, between members of the family too."""
        weights = arguments.get("weights")
        sums = (self.rule(arguments).moments_key(), None if weights is None else tuple(weights))
        return ("gram", *sums) if self.has_grams else sums

    def prepare(self, deltas: Sequence[Tensor], **arguments: Any) -> solver.State | Descent:
        """First stage. A state belongs to one thread: the first `finish` stores its eigendecomposition there."""
        rule, weights = self.rule(arguments), arguments.get("weights")
        if isinstance(rule, Adam):
            return accumulate(deltas, weights)
        return solver.prepare(deltas, rule, weights=weights, grams=_grams(arguments) if self.has_grams else None)

    def finish(self, state: solver.State | Descent, **arguments: Any) -> Merged:
        """Second stage; the state remains usable."""
        return self._solved(state, arguments, consume=False)

    def cost_of(self, estimate: Callable[..., int]) -> Callable[[Sequence[int], int, Mapping[str, Any]], int]:
        """A facet of `MethodCost` from an estimate for the rule that the options choose."""
        return lambda shape, n_experts, options: estimate(
            shape, n_experts, self.rule_of(**options), has_grams=self.has_grams
        )

    def meets_all(self, options: Mapping[str, Any]) -> bool:
        """See `LowRankForm`: every eigenvector of `S` counts in full, whatever its eigenvalue."""
        rule = self.rule_of(**options)
        if self.has_grams or isinstance(rule, Adam) or rule.spectral.kind != "hard" or rule.estimator.trim is not None:
            return False
        return not rule.estimator.center or rule.null == "zero"  # a fill adds mean rows, which no `K_t` knows

    def _solved(self, state: solver.State | Descent, arguments: Mapping[str, Any], *, consume: bool) -> Merged:
        rule, base = self.rule(arguments), arguments.get("base")
        if isinstance(state, Descent):
            assert isinstance(rule, Adam), "the state and the options belong together"
            return Merged(*descend(state, rule))
        assert isinstance(rule, InterferenceRule), "the state and the options belong together"
        if rule.null == "minus_base":
            given_base("form='weight'", base)
        return Merged(*solver.finish(state, rule, base=base, consume=consume))


def _why_dense(rule: InterferenceRule | Adam, weights: Weights) -> str | None:
    if isinstance(rule, Adam):
        return _ADAM_NEEDS_ENTRIES
    if rule.null == "minus_base":
        return _FILL_IS_DENSE
    return rule.weights_problem(weights) if rule.estimator.trim is None else _TRIM_NEEDS_ENTRIES


def _grams(arguments: Mapping[str, Any]) -> Sequence[Tensor]:
    statistics: Mapping[str, Sequence[Tensor]] | None = arguments.get("statistics")
    if statistics is None or "gram" not in statistics:
        kinds = "none" if not statistics else ", ".join(statistics)
        raise StatisticsError(
            f"RegMean needs statistics of kind 'gram', one input Gram matrix per expert; found {kinds}. Collect them "
            "on a few batches of each expert's data, or use a data-free method such as 'actmat'."
        )
    return statistics["gram"]
