"""Choice of the method for every tensor, with the reason in words."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from actmat.checkpoints.base import TensorSpec
from actmat.errors import MergeError, first_names
from actmat.layout.classify import is_variance
from actmat.layout.paper import paper_scope
from actmat.layout.patterns import compile_pattern
from actmat.layout.types import Role, TensorLayout
from actmat.methods import MergeMethod, get_method
from actmat.methods.facets import MEAN
from actmat.methods.post import Step, get_step
from actmat.methods.spaces import space_problems
from actmat.planning.calls import NOWHERE, CallTemplate, TensorPlace, WeightsTemplate, places_of
from actmat.planning.item import Action, MethodCall
from actmat.recipe import Recipe
from actmat.recipe.values import Value

WHOLE = {"scaling": 1.0}
"""Options of `task_arithmetic` by which it adds one delta unchanged."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Action, method and reason for one tensor; the layout may be narrowed by the paper's scope."""

    action: Action
    reason: str
    layout: TensorLayout
    call: MethodCall | None = None


class Chooser:
    """The recipe's choices, patterns compiled once.

    `problems` collects what is wrong with methods, options and patterns; `post` are the steps of post-processing.
    """

    def __init__(self, recipe: Recipe, available: frozenset[str] = frozenset(), names: Collection[str] = ()) -> None:
        self.recipe = recipe
        self.problems: list[str] = []
        self.post = post_calls(recipe, self.problems)
        self.names = names
        self._weights = WeightsTemplate(recipe.labels, recipe.weights, recipe.normalize)
        self._default = self._call(recipe.method, recipe.options, recipe.scale, "", available)
        self._rules: list[tuple[list[tuple[str, Callable[[str], bool]]], CallTemplate | None, str]] = []
        for i, rule in enumerate(recipe.rules):
            where = f"rules.{i}: "
            call = None
            if not rule.keep:
                same = rule.method in (None, recipe.method)
                options = {**recipe.options, **rule.options} if same else rule.options
                scale = recipe.scale if rule.scale is None else rule.scale
                call = self._call(rule.method or recipe.method, options, scale, where, available, same=same)
            self._rules.append((_compiled(rule.match), call, "keep" if rule.keep else "merge"))
        self._keep = _compiled(recipe.keep)

    def keeps(self, name: str) -> str | None:
        """The pattern by which the recipe keeps the base's tensor `name`, or None."""
        hit = self._match(self._keep, name)
        if hit is not None:
            return hit
        for patterns, _, what in self._rules:
            if (hit := self._match(patterns, name)) is not None:
                return hit if what == "keep" else None
        return None

    def decide(self, spec: TensorSpec, layout: TensorLayout) -> Decision:
        """Decision for one float tensor that is not kept."""
        template, rule = self._template(spec.name)
        if template is None:  # the method or its options were wrong: a problem was noted, go on finding others
            return Decision("average", "", layout)
        method, why = template.method, f", chosen by the rule for '{rule}'" if rule is not None else ""
        inside, reason, layout = self._inside(spec, layout, explicit=rule is not None)
        if inside and method.acts_on == "matrix" and not has_spectrum(layout):
            inside, reason = False, f"{layout.reason}: {method.name} acts on matrices"
        try:
            if not inside:
                return self._elsewhere(spec.name, template, reason, layout)
            call, words = template.at(spec.name, self.places.get(spec.name, NOWHERE))
            if has_spectrum(layout) and (self.recipe.space != "full" or self.post):  # else entries only
                call = dataclasses.replace(call, space=self.recipe.space, post=self.post)
            if (whole := self._added_whole(method, call)) is not None:
                call, words = whole, f"{words} of one expert is its delta: added whole"
            return Decision("merge", f"{reason}: {method.name}{words}{why}", layout, call)
        except LookupError as missing:
            self._note_missing(missing, spec.name)
            return Decision("average", "", layout)

    def elsewhere(self, name: str, having: Sequence[bool]) -> MethodCall:
        """The call for a tensor that the method does not act on; a mean is over the experts that have it."""
        template, _ = self._template(name)
        decision = Decision("average", "", TensorLayout(Role.VECTOR, ""), MethodCall("average", {}))
        try:
            decision = decision if template is None else self._elsewhere(name, template, "", decision.layout)
        except LookupError as missing:
            self._note_missing(missing, name)
        if decision.action == "average" and not all(having):
            decision = self.average_over(name, decision, having)
        return decision.call or MethodCall("average", {})

    def _template(self, name: str) -> tuple[CallTemplate | None, str | None]:
        """The recipe's choice for a tensor, and the pattern of the rule that made it."""
        for patterns, call, _ in self._rules:
            if (hit := self._match(patterns, name)) is not None:
                return call, hit
        return self._default, None

    def _added_whole(self, method: MergeMethod, call: MethodCall) -> MethodCall | None:
        """The call that adds one delta, if the method would compute the same one with rounding errors; else None."""
        is_alone = len(self.recipe.experts) == 1 and "single" in method.laws and method.acts_on != "elementwise"
        is_plain = call.space == "full" and call.weights in (None, (1.0,))
        if is_alone and is_plain and call.options == method.resolve_options({}):  # the law is one of the defaults
            return dataclasses.replace(call, method="task_arithmetic", options=WHOLE, weights=None)
        return None

    @functools.cached_property
    def places(self) -> Mapping[str, TensorPlace]:
        """Places of the tensors in depth."""
        return places_of(self.names)

    def unused_entries(self) -> list[str]:
        """One sentence for each pattern of a weight or an option that matches no tensor."""
        templates = [self._default, *(t for _, t, _ in self._rules)]
        entries = [*self._weights.patterns(), *(p for t in templates if t is not None for p in t.patterns())]
        return [
            f"{where}: the pattern '{text}' matches no tensor"
            for where, text in dict.fromkeys(entries)
            if not any(map(compile_pattern(text), self.names))
        ]

    def unused_patterns(self, names: Collection[str]) -> list[str]:
        """Patterns that match none of these tensors (a typo, most of the time), whichever rule takes them."""
        rules = zip(self.recipe.rules, self._rules, strict=True)
        listed = [*(pair for rule, (patterns, _, _) in rules if not rule.optional for pair in patterns), *self._keep]
        return [text for text, matches in listed if not any(map(matches, names))]

    def _inside(self, spec: TensorSpec, layout: TensorLayout, explicit: bool) -> tuple[bool, str, TensorLayout]:
        if not explicit and self.recipe.scope == "all" and is_variance(spec.name):
            return False, "variance of a BatchNorm, which other methods may make negative", layout
        if explicit or self.recipe.scope == "all":
            return True, layout.reason, layout
        if self.recipe.scope == "paper":
            inside, reason = paper_scope(spec.name, spec)
            if inside and not layout.role.is_matrix:
                layout = TensorLayout(Role.LINEAR, reason)
            return inside, reason, layout
        if layout.role is Role.CONVOLUTION:
            return self._convolution(spec, layout)
        return layout.role.is_matrix and layout.role is not Role.ROUTER, layout.reason, layout

    def _convolution(self, spec: TensorSpec, layout: TensorLayout) -> tuple[bool, str, TensorLayout]:
        """A kernel of one point is a linear map of channels; a larger one sees its inputs shifted, so is averaged."""
        if all(side == 1 for side in spec.shape[2:]) and min(spec.shape[:2]) > 1:
            return True, f"{layout.reason}, a linear map of channels", layout
        more = "" if spec.shape[1] == 1 else " (scope: all or a rule merges it unfolded)"
        return False, f"{layout.reason}: not a linear map of one vector{more}", layout

    def _elsewhere(self, name: str, template: CallTemplate, reason: str, layout: TensorLayout) -> Decision:
        """Decision for a tensor that the method does not act on: its elementwise counterpart, with the same weights.

        Raises:
            LookupError: a value has no entry for the tensor.
        """
        method, count = template.method, len(self.recipe.experts)
        mean = f"{reason}: mean of the deltas"
        of_paper = self.recipe.scope == "paper" and not self._weights.is_given
        if method.elsewhere is MEAN or of_paper:
            return Decision("average", mean, layout, self.average(name))
        call = template.at(name, self.places.get(name, NOWHERE))[0]
        rule = method.elsewhere(call.options, count)
        if rule == "mean" or (rule == "share" and call.weights is None):
            return Decision("average", mean, layout, self.average(name))
        if rule == "share":
            share = MethodCall("task_arithmetic", {"scaling": 1 / count}, 1.0, call.weights)
            return Decision("average", f"{mean}, times their weights", layout, share)
        if not isinstance(rule, str | float):
            words = f"{reason}: {' and '.join(f'{c:g}' for c in rule)} of the deltas"
            return Decision("average", words, layout, MethodCall("task_arithmetic", WHOLE, 1.0, tuple(rule)))
        if rule != "own":
            call = dataclasses.replace(call, method="task_arithmetic", options={"scaling": rule})
        factors = [call.scale * call.options.get("scaling", 1.0) * w for w in call.weights or [1.0] * count]
        if is_variance(name) and min(factors) < 0:
            return Decision("copy", f"{reason}: a weighted sum may make a variance negative; the base's", layout)
        if is_variance(name) and sum(factors) > 1:
            return Decision("average", mean, layout, self.average(name))
        return Decision("merge", f"{reason}: weighted sum of the deltas", layout, call)

    def average(self, name: str) -> MethodCall:
        """The mean of the deltas of a tensor; all weights 0: a sum, which changes nothing."""
        weights = self._weights_of(name)
        if weights and not any(weights):
            return MethodCall("task_arithmetic", WHOLE, 1.0, weights)
        return MethodCall("average", {}, 1.0, weights)

    def _weights_of(self, name: str) -> tuple[float, ...] | None:
        try:
            return self._weights.at(name, self.places.get(name, NOWHERE), plain=True)
        except LookupError as missing:
            self._note_missing(missing, name)
            return None

    def _note_missing(self, missing: LookupError, name: str) -> None:
        self.problems.append(
            f"{missing.args[0]} has no entry that matches tensor '{name}': end the list with an entry for all others, "
            "{value: ...}"
        )

    def average_over(self, name: str, decision: Decision, having: Sequence[bool]) -> Decision:
        """The average over the experts that have a delta, and the words for it."""
        if decision.call is not None and decision.call.method != "average":
            if decision.call.options == WHOLE:
                return decision
            share = dataclasses.replace(decision.call, options={"scaling": 1 / sum(having)})
            return dataclasses.replace(decision, call=share)
        weights = self._weights_of(name) or (1.0,) * len(having)
        chosen = tuple(w if has else 0.0 for w, has in zip(weights, having, strict=True))
        if math.fsum(chosen) == 0:
            return decision
        missing = [label for label, has in zip(self.recipe.labels, having, strict=True) if not has]
        reason = f"{decision.reason} over the experts that have it; not in {', '.join(missing)}"
        return dataclasses.replace(decision, reason=reason, call=MethodCall("average", {}, 1.0, chosen))

    def _call(
        self,
        name: str,
        options: Mapping[str, object],
        scale: Value,
        where: str,
        available: frozenset[str],
        *,
        same: bool = True,
    ) -> CallTemplate | None:
        try:
            method = get_method(name)
            of_experts = [e.options if same else {} for e in self.recipe.experts]
            template = CallTemplate.make(method, options, of_experts, scale, self._weights)
        except MergeError as error:
            self.problems.extend(where + p for p in error.problems)
            return None
        missing = [k for k in method.needs_statistics if k not in available]
        if missing:
            self.problems.append(
                f"{where}method '{name}' needs statistics measured on data ({', '.join(missing)}), and not every "
                "expert has them; collect them (actmat statistics collect) and give --statistics NAME=PATH once per "
                "expert, or choose a data-free method (see `actmat methods`)"
            )
        n_experts = len(self.recipe.experts)
        if method.max_experts is not None and n_experts > method.max_experts:
            self.problems.append(
                f"{where}method '{name}' merges at most {method.max_experts} expert(s), but there are {n_experts}"
            )
        if self._weights.is_given and not method.is_weighted:
            self.problems.append(f"{where}method '{name}' takes no weights, but the recipe gives experts weights")
        if self.recipe.normalize and not method.is_weighted:
            self.problems.append(
                f"{where}method '{name}' takes no weights, so that 'normalize' has no meaning: drop it"
            )
        self.problems.extend(where + p for p in space_problems(self.recipe.space, method, template.options, n_experts))
        return template

    def _match(self, patterns: list[tuple[str, Callable[[str], bool]]], name: str) -> str | None:
        return next((text for text, matches in patterns if matches(name)), None)


def _compiled(patterns: Sequence[str]) -> list[tuple[str, Callable[[str], bool]]]:
    return [(text, compile_pattern(text)) for text in patterns]


def weight_problems(calls: Mapping[str, MethodCall | None]) -> list[str]:
    """Problems of weights that the methods of tensors refuse, one line each."""
    by_problem: dict[str, list[str]] = {}
    for name, call in calls.items():
        problem_of = get_method(call.method).plan.weights_problem if call and call.weights else None
        if call and call.weights and problem_of and (problem := problem_of(call.options, call.weights)):
            by_problem.setdefault(problem, []).append(name)
    return [f"{first_names(names)}: {problem}" for problem, names in by_problem.items()]


def post_calls(recipe: Recipe, problems: list[str]) -> tuple[Step, ...]:
    """The recipe's steps with all their options; `problems` receives their problems."""
    calls = []
    for named in recipe.post:
        try:
            step = get_step(named.name)
            calls.append(Step(step.name, step.resolve_options(named.options)))
        except MergeError as error:
            problems.extend(f"post: {problem}" for problem in error.problems)
    return tuple(calls)


def has_spectrum(layout: TensorLayout) -> bool:
    """True if the tensor holds linear maps: a table of vectors has no meaningful singular values."""
    return layout.role.is_matrix or layout.role is Role.CONVOLUTION
