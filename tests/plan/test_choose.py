"""Which rule acts on which tensor: rules in order, keep, scope, weights, depth factors, and words for all of it."""

from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.layout.types import Role, TensorLayout
from actmat.planning.calls import TensorPlace, places_of
from actmat.planning.choose import Chooser, Decision, weight_problems
from actmat.recipe import make_recipe


def chooser(**fields: Any) -> Chooser:
    return Chooser(make_recipe({"base": "b", "experts": ["e1", "e2"], "method": "actmat", **fields}))


def decide(found: Chooser, name: str, role: Role = Role.LINEAR, shape: tuple[int, ...] = (4, 3)) -> Decision:
    return found.decide(TensorSpec(name, shape, "float32", "f"), TensorLayout(role, "why"))


def method(decision: Decision) -> str:
    return decision.call.method


def test_the_first_rule_that_matches_decides() -> None:
    rules = [
        {"match": "*.mlp.*", "method": "ties", "options": {"density": 0.3}},
        {"match": ["*.1.*", "*.q.*"], "scale": 0.1},
        {"match": "*.norm", "keep": "base"},
    ]
    found = chooser(rules=rules, options={"rtol": 1e-4})
    first = decide(found, "layers.1.mlp.w")
    assert method(first) == "ties"
    assert "rtol" not in first.call.options, "options belong to the recipe's method"
    assert "chosen by the rule for '*.mlp.*'" in first.reason
    second = decide(found, "layers.1.q.w")
    assert (second.call.method, second.call.scale, second.call.options["rtol"]) == ("actmat", 0.1, 1e-4)
    assert found.keeps("layers.0.norm") == "*.norm"
    assert found.keeps("layers.1.mlp.norm") is None, "an earlier rule has it"
    assert found.unused_patterns(["layers.1.mlp.w", "layers.1.q.w", "layers.0.norm"]) == []


def test_patterns_that_match_nothing_are_told() -> None:
    found = chooser(keep=["*.head", "*.none"], rules=[{"match": ["a*", "b*"]}])
    assert found.unused_patterns(["x.head", "b.w"]) == ["a*", "*.none"]


def test_a_pattern_that_another_comes_before_is_not_unused() -> None:
    found = chooser(keep=["*.w", "a.*"], rules=[{"match": ["a*", "a.w"]}])
    assert found.unused_patterns(["a.w"]) == []


def test_keep_wins_over_rules() -> None:
    assert chooser(keep=["w"], rules=[{"match": "w", "method": "ties"}]).keeps("w") == "w"


def test_a_rule_reaches_outside_the_scope() -> None:
    found = chooser(rules=[{"match": "embed", "method": "average"}, {"match": "norm"}])
    assert decide(found, "embed", Role.EMBEDDING).action == "merge"
    norm = decide(found, "norm", Role.VECTOR, (4,))
    assert norm.action == "average", "a matrix rule cannot act on a vector"
    assert "actmat acts on matrices" in norm.reason


def test_scope_all() -> None:
    assert decide(chooser(method="ties", scope="all"), "norm", Role.VECTOR, (4,)).action == "merge"
    assert decide(chooser(scope="all"), "norm", Role.VECTOR, (4,)).action == "average"
    assert decide(chooser(scope="all"), "conv", Role.CONVOLUTION, (4, 3, 2)).action == "merge"
    assert decide(chooser(scope="linear"), "conv", Role.CONVOLUTION, (4, 3, 2)).action == "average"


def test_every_wrong_choice_is_collected() -> None:
    rules = [{"match": "a", "method": "tise"}, {"match": "b", "method": "ties", "options": {"rtl": 1}}]
    found = chooser(method="acmat", rules=rules)
    text = "\n".join(found.problems)
    assert len(found.problems) == 3
    for words in ("Did you mean 'actmat'?", "rules.0: There is no method 'tise'", "rules.1: "):
        assert words in text
    assert decide(found, "w").call is None, "and the others go on being found"


def test_weights_that_cancel_have_no_mean() -> None:
    experts = [{"path": "e1", "weight": 1.0}, {"path": "e2", "weight": -1.0}]
    found = chooser(method="ties", experts=experts)
    calls = {name: decide(found, name, Role.VECTOR, (4,)).call for name in "abcde"}
    (problem,) = weight_problems(calls)
    assert problem.startswith("'a', 'b', 'c' and 2 more: expected weights with a sum other than 0, found 1, -1")
    assert "scaling=1" in problem
    kept = found.average_over("a", decide(found, "a", Role.VECTOR, (4,)), [True, False])
    assert kept.call.weights == (1.0, 0.0), "of one expert there is a mean"
    assert not weight_problems({"a": kept.call})


def test_methods_that_need_data_are_refused_without() -> None:
    assert any("needs statistics" in p for p in chooser(method="fisher").problems)
    recipe = make_recipe({"base": "b", "experts": ["e"], "method": "fisher"})
    assert Chooser(recipe, frozenset({"fisher", "gram"})).problems == []


def test_depth_is_the_first_number_in_each_stack() -> None:
    places = places_of(["encoder.2.w", "decoder.blocks.4.w", "decoder.blocks.0.experts.7.w", "head.w", "solo.0.w"])
    assert places == {
        "encoder.2.w": TensorPlace(2, 3),
        "decoder.blocks.4.w": TensorPlace(4, 5),
        "decoder.blocks.0.experts.7.w": TensorPlace(0, 5),
        "solo.0.w": TensorPlace(0, 1),
    }
