"""Weights, options and scales that differ from tensor to tensor: gradients over depth, entries by pattern."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import Family, actmat

from actmat.checkpoints.base import TensorSpec
from actmat.errors import MergeError, RecipeError
from actmat.layout.types import Role, TensorLayout
from actmat.planning.calls import NOWHERE, TensorPlace, places_of, resolved
from actmat.planning.choose import Chooser, Decision
from actmat.recipe import make_recipe, recipe_yaml
from actmat.recipe.values import Entry, format_value, leaves, read_value

NAMES = ["embed.weight", *(f"layers.{k}.{part}.weight" for k in range(4) for part in ("attn", "mlp")), "head.weight"]


def decide(name: str, experts: list[Any] | None = None, **fields: Any) -> Decision:
    recipe = make_recipe({"base": "b", "scope": "all", "experts": experts or ["e1", "e2"], **fields})
    chooser = Chooser(recipe, names=NAMES)
    decision = chooser.decide(TensorSpec(name, (4, 3), "float32", "f"), TensorLayout(Role.LINEAR, "why"))
    assert not chooser.problems, chooser.problems
    return decision


def call_of(name: str, experts: list[Any] | None = None, **fields: Any) -> Any:
    decision = decide(name, experts, **fields)
    return decision.call


@pytest.mark.parametrize("count", [2, 3, 5, 12])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5, 1.0), (0.3, -0.2, 0.7, 0.1, 5.0)])
def test_gradients_are_interpolated_linearly(values: tuple[float, ...], count: int) -> None:
    grid = np.linspace(0, len(values) - 1, count)
    wanted = np.interp(grid, np.arange(len(values)), values)
    found = [resolved(values, "x", TensorPlace(k, count)) for k in range(count)]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert resolved((Entry(value=values),), "x", TensorPlace(count - 1, count)) == values[-1]


def test_ends_of_gradients() -> None:
    assert resolved((1.0, 2.0, 3.0), "x", TensorPlace(0, 1)) == 3.0, "one layer has the last value"
    assert resolved((1.0, 2.0, 3.0), "x", NOWHERE) == 1.0, "tensors outside of layers have the first"
    assert [resolved((True, False), "x", TensorPlace(k, 3)) for k in range(3)] == [True, True, False]
    assert resolved((0.5,), "x", TensorPlace(2, 3)) == 0.5


def test_entries_decide_in_order() -> None:
    value = read_value(
        [
            {"match": "*.mlp.*", "layers": [1, 3], "value": [0.0, 1.0]},
            {"match": ["*.mlp.*", "head*"], "value": 7},
            {"layers": "before", "value": -1},
            {"value": 0.5},
        ]
    )
    places = places_of(NAMES)
    found = {n: resolved(value, n, places.get(n, NOWHERE)) for n in NAMES}
    assert [found[f"layers.{k}.mlp.weight"] for k in range(4)] == [7, 0.0, 1.0, 7]
    assert (found["embed.weight"], found["head.weight"], found["layers.2.attn.weight"]) == (-1, 7, 0.5)
    assert sorted(leaves(value)) == [-1, 0.0, 0.5, 1.0, 7]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("much", "expected a number, a list of numbers"),
        ([], "empty list"),
        ([0.1, "x"], "found 'x'"),
        ([{"value": 0.1}, {"match": "*", "vlue": 2}], "expected a number, a list of numbers"),
        ([{"value": 0.1, "lyers": [0, 1]}], "lyers"),
        ([{"value": []}], "at least one value"),
        (float("nan"), "finite"),
        (1e39, "float32 holds"),
        ([0.0, 1e39], "float32 holds"),
    ],
)
def test_bad_values_are_refused_with_their_place(value: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as refused:
        make_recipe({"base": "b", "experts": [{"path": "e", "weight": value}]})
    assert "experts.0.weight" in str(refused.value)


def test_weights_differ_from_tensor_to_tensor_and_the_reason_says_so() -> None:
    experts = [
        {"path": "e1", "weight": [0, 1]},
        {"path": "e2", "weight": [{"match": "*.mlp.*", "value": 2}, {"value": 0.5}]},
    ]
    found = decide("layers.3.attn.weight", experts, method="ties")
    assert found.call.weights == (1.0, 0.5)
    assert found.reason == "why: ties with weights 1, 0.5"
    assert call_of("layers.1.mlp.weight", experts, method="ties").weights == (pytest.approx(1 / 3), 2.0)
    assert call_of("head.weight", experts, method="ties").weights == (0.0, 0.5)
    mean = decide("layers.3.attn.weight", experts, method="ties", scope="linear")
    assert mean.call is not None


def test_an_average_has_the_weights_of_its_tensor() -> None:
    experts = [{"path": "e1", "weight": [0, 1]}, "e2"]
    recipe = make_recipe({"base": "b", "experts": experts, "method": "ties"})
    chooser = Chooser(recipe, names=NAMES)
    found = chooser.decide(TensorSpec("layers.3.mlp.weight", (4,), "float32", "f"), TensorLayout(Role.VECTOR, "why"))
    assert (found.action, found.call.weights) == ("average", (1.0, 1.0))
    assert chooser.average("layers.0.mlp.weight").weights == (0.0, 1.0)


def test_normalize_divides_by_the_sum_and_leaves_a_sum_of_zero() -> None:
    experts = [{"path": "e1", "weight": 3}, {"path": "e2", "weight": [-3, 1]}]
    at = {k: call_of(f"layers.{k}.mlp.weight", experts, method="task_arithmetic", normalize=True) for k in (0, 3)}
    assert at[0].weights == (3.0, -3.0)
    assert at[3].weights == (0.75, 0.25)
    assert call_of("head.weight", method="task_arithmetic", normalize=True).weights == (0.5, 0.5)
    recipe = make_recipe({"base": "b", "experts": ["e1"], "method": "slerp", "normalize": True})
    assert "'normalize' has no meaning" in Chooser(recipe).problems[0]


def test_options_of_one_number_take_a_list_as_gradient() -> None:
    at = [
        call_of(f"layers.{k}.mlp.weight", method="slerp", options={"t": [0, 0.3, 0.9]}).options["t"] for k in range(4)
    ]
    assert at == pytest.approx([0.0, 0.2, 0.5, 0.9])
    marked = call_of("layers.3.mlp.weight", method="ties", options={"density": [{"value": [0.1, 0.9]}]})
    assert marked.options["density"] == 0.9
    plain = call_of("layers.3.mlp.weight", method="ties", options={"density": [0.1, 0.9]})
    assert plain.options["density"] == [0.1, 0.9], "one number per expert, as ever"


def test_options_of_single_experts() -> None:
    experts = [{"path": "e1", "options": {"density": [0.2, 0.8]}}, "e2"]
    call = call_of("layers.3.mlp.weight", experts, method="ties", options={"density": 0.5})
    assert call.options["density"] == [0.8, 0.5]
    assert call_of("head.weight", experts, method="ties").options["density"] == [0.2, 0.2]
    rules = [{"match": "head*", "method": "average"}]
    assert call_of("head.weight", experts, method="ties", rules=rules).method == "average"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts": [{"path": "e", "options": {"t": 0.2}}], "method": "slerp"}, "one for all experts"),
        ({"experts": [{"path": "e", "options": {"densty": 0.2}}], "method": "ties"}, "has an option 'densty'"),
        ({"experts": [{"path": "e", "options": {"density": [0.2, 1.5]}}], "method": "ties"}, "must lie in \\[0, 1\\]"),
        ({"method": "slerp", "options": {"linear_above": [0.2, 1.5]}}, "must lie in \\[0, 1\\], got 1.5"),
        ({"method": "slerp", "options": {"s": [{"value": 1}]}}, "has no option 's'"),
        (
            {"method": "slerp", "options": {"t": [{"match": "*.mlp.*", "value": 1}]}},
            "no entry that matches tensor 'head",
        ),
        (
            {"method": "ties", "options": {"trim": "global", "density": [{"value": [0, 1]}]}},
            "measures the whole model",
        ),
    ],
)
def test_what_does_not_fit_is_a_problem_of_the_plan(fields: dict[str, Any], said: str) -> None:
    recipe = make_recipe({"base": "b", "experts": ["e1"], "scope": "all", **fields})
    chooser = Chooser(recipe, names=NAMES)
    if not chooser.problems:
        chooser.decide(TensorSpec("head.weight", (4, 3), "float32", "f"), TensorLayout(Role.LINEAR, "why"))
    with pytest.raises(RecipeError, match=said):
        raise RecipeError("found", chooser.problems)


def test_patterns_of_values_that_match_nothing_are_told() -> None:
    weight = [{"match": "*.mpl.*", "value": 2}, {"match": "*.mlp.*", "value": 3}, {"value": 1}]
    options = {"density": [{"match": "tail*", "value": 0.1}, {"value": 0.2}]}
    fields = {"base": "b", "experts": [{"path": "e1", "weight": weight}], "method": "ties", "options": options}
    notes = Chooser(make_recipe(fields), names=NAMES).unused_entries()
    assert [note.split("'")[1] for note in notes] == ["*.mpl.*", "tail*"]


def test_values_survive_yaml_and_json() -> None:
    experts = [
        {"path": "e1", "weight": [0, 0.5, 1]},
        {"path": "e2", "weight": [{"match": "*mlp*", "value": [1, 2]}, {"value": 3}]},
    ]
    options = {"density": [{"value": [0.1, 0.2]}]}
    recipe = make_recipe({"base": "b", "experts": experts, "method": "ties", "options": options, "scale": [1, 2]})
    assert make_recipe(recipe.model_dump(mode="json")) == recipe
    text = recipe_yaml(recipe)
    assert "weight: [0.0, 0.5, 1.0]" in text
    assert "match:\n    - '*mlp*'" in text
    assert [format_value(v) for v in recipe.weights] == ["0 to 0.5 to 1 over depth", "by pattern"]


def test_a_merge_is_its_equation_and_runs_again_from_its_manifest(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=3)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        """
base: base
experts:
- {path: expert0, weight: [0, 1]}
- {path: expert1, weight: [{match: "*mlp*", value: [0.5, 0.1]}, {value: 0.25}]}
method: task_arithmetic
options: {scaling: 1.0}
scale: [2, 4]
scope: all
dtype: float64
compute_dtype: float64
out: out
""",
        encoding="utf-8",
    )
    actmat(["merge", file, "--threads", "1", "--quiet"], code=0)
    base, one, two = (load_file(p / "model.safetensors") for p in (family.base, *family.experts))
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in got.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        t = layer / 2
        second = 0.5 - 0.4 * t if "mlp" in name else 0.25
        w = base[name].double()
        wanted = w + (2 + 2 * t) * (t * (one[name].double() - w) + second * (two[name].double() - w))
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)
    shown = actmat(["plan", file])
    assert "task_arithmetic with weights 0.5, 0.3;" in shown.words
    actmat(["verify", tmp_path / "out"], code=0)


def test_zero_deltas_do_not_hide_a_method_that_moves_the_base(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=1)
    out = tmp_path / "half"
    flags = ["-e", str(family.base), "-m", "linear", "-o", "normalize=false", "-w", "0.5", "--set", "scope=all"]
    actmat(["merge", "-b", family.base, *flags, "--out", out, "--quiet"], code=0)
    base, got = load_file(family.base / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(got[n], 0.5 * base[n]) for n in base)


def test_aliases_of_mergekit_are_methods_with_options() -> None:
    recipe = make_recipe({"base": "b", "experts": ["e"], "method": "dare_ties", "options": {"reduce": "mean"}})
    assert (recipe.method, recipe.options) == ("dare", {"rule": "ties", "rescale": "l1", "reduce": "mean"})
    rule = make_recipe({"base": "b", "experts": ["e"], "rules": [{"match": "*", "method": "della_linear"}]}).rules[0]
    assert (rule.method, rule.options["sign_election"]) == ("della", False)


def test_a_search_wants_plain_numbers(tmp_path: Path) -> None:
    from actmat.extras.tune.space import make_space
    from actmat.extras.tune.tuning import tune_recipe

    recipe = make_recipe({"base": "b", "experts": ["e"], "scale": [0, 1], "out": str(tmp_path / "out")})
    with pytest.raises(MergeError, match="plain numbers"):
        tune_recipe(recipe, make_space({"methods": ["ties"]}), {})
