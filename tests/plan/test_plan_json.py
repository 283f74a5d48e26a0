"""A plan is data: it pickles, and is JSON; its fingerprint changes with what decides the output's bytes."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from tests.helpers.adapters import save_adapter, tiny
from tests.helpers.merging import CONFIG, EMBEDDING, expert_of, llama_tensors, save_checkpoint

import actmat
from actmat.errors import MergeError, RecipeError
from actmat.extras.collect.collect import collect
from actmat.methods import all_methods
from actmat.planning import MergePlan

METHOD_NAMES = [m.name for m in all_methods() if not m.needs_statistics and m.max_experts is None]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "scope": st.sampled_from(["linear", "paper", "all"]),
    "scale": st.floats(-2, 2),
    "seed": st.integers(0, 2**40),
    "keep": st.sampled_from([[], ["*.down_proj.weight"], ["re:.*layers\\.0\\..*v_proj.*"]]),
    "rules": st.lists(
        st.fixed_dictionaries(
            {"match": st.sampled_from(["*.q_proj.weight", "*.layers.1.*"])},
            optional={"method": st.sampled_from(METHOD_NAMES), "scale": st.floats(0, 1)},
        ),
        max_size=2,
    ),
    "post": st.sampled_from([(), "mean_norm", ["subspace_boosting:beta=0.5", "isotropize"]]),
    "postprocess": st.fixed_dictionaries(
        {},
        optional={
            "lines": st.tuples(st.floats(0, 1), st.floats(0, 2)),
            "norm_cap": st.sampled_from(["mean", "sum", "average", 0.5]),
        },
    ),
    "ties": st.booleans(),
    "dtype": st.sampled_from([None, "bfloat16", "float32"]),
    "compute_dtype": st.sampled_from(["float32", "float64"]),
    "max_shard_size": st.sampled_from(["5GB", "2KB"]),
    "mute": st.sampled_from([[], ["AM402"]]),
}
OF_ADAPTERS = {"rank": st.integers(1, 9), "ranks": st.sampled_from(["uniform", "pattern"]), "any_base": st.booleans()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters, the same experts as full models, statistics of all four; a base with ties, its experts."""
    folder = tmp_path_factory.mktemp("plans")
    tensors = llama_tensors()
    for n, name in enumerate(["tied", "t1", "t2"]):
        values = expert_of(tensors, n) if n else tensors
        tied = {**values, "lm_head.weight": values[EMBEDDING].clone()}
        save_checkpoint(folder / name, tied, {**CONFIG, "tie_word_embeddings": True})
    model = tiny("llama")
    model.save_pretrained(folder / "base")
    options = [{"target_modules": ["q_proj", "v_proj", "down_proj"]}, {"target_modules": ["q_proj", "embed_tokens"]}]
    for n, chosen in enumerate(options, 1):
        values = save_adapter(folder / f"a{n}", "llama", n, r=n, **chosen)
        model.load_state_dict(values, strict=False)
        model.save_pretrained(folder / f"m{n}")
        tokens = {"input_ids": torch.tensor([[1, 2, 3, n]])}
        collect(model, [tokens], out=folder / f"stats-m{n}", checkpoint=str(folder / f"m{n}"))
        adapted = PeftModel.from_pretrained(tiny("llama"), folder / f"a{n}")
        places = {"checkpoint": str(folder / "base"), "adapter": str(folder / f"a{n}")}
        collect(adapted, [tokens], out=folder / f"stats-a{n}", **places)
    return folder


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `actmat.plan`, with names of inputs in place of their locations."""
    experts = draw(st.sampled_from([("a1", "a2"), ("m1", "m2"), ("a1", "m2"), ("a2",), ("t1", "t2")]))
    adapters = all(e.startswith("a") for e in experts)
    to = draw(st.sampled_from(["adapter", "model"] if adapters else ["model"]))
    chosen = FIELDS | (OF_ADAPTERS if to == "adapter" else {})
    fields = draw(st.fixed_dictionaries({}, optional=chosen))
    statistics = "t1" not in experts and draw(st.booleans())
    method = draw(st.sampled_from(["regmean", "lot"] if statistics else METHOD_NAMES))
    weights = draw(st.none() | st.lists(st.floats(0.1, 3), min_size=len(experts), max_size=len(experts)))
    if weights is not None and next(m for m in all_methods() if m.name == method).is_weighted:
        fields["weights"] = weights
    return {"experts": experts, "to": to, "method": method, "statistics": statistics, **fields}


def planned(inputs: Path, request: dict[str, Any]) -> MergePlan:
    fields = dict(request)
    names = fields.pop("experts")
    with_statistics = fields.pop("statistics")
    if with_statistics:
        fields["statistics"] = [inputs / f"stats-{n}" for n in names]
    return actmat.plan(inputs / ("tied" if "t1" in names else "base"), [inputs / n for n in names], **fields)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(request=requests())
def test_a_plan_is_data(inputs: Path, request: dict[str, Any]) -> None:
    try:
        plan = planned(inputs, request)
    except MergeError:
        event("refused")
        return
    event(f"{plan.output} of {' and '.join(e.kind for e in plan.experts)}")
    text = json.dumps(plan.to_json(), allow_nan=False)
    for again in (pickle.loads(pickle.dumps(plan)), MergePlan.from_json(json.loads(text))):
        assert again == plan
        assert again.fingerprint() == plan.fingerprint()
        assert json.dumps(again.to_json()) == text


@pytest.mark.parametrize(("change", "says"), [({"actmat_plan": 0}, "layout 1, found 0"), ({"items": [1]}, "damaged")])
def test_what_is_no_plan_is_refused(inputs: Path, change: dict[str, Any], says: str) -> None:
    data = planned(inputs, {"statistics": False} | EXAMPLES["model"]).to_json()
    with pytest.raises(RecipeError, match=says):
        MergePlan.from_json(data | change)


EXAMPLES: dict[str, dict[str, Any]] = {
    "model": {"experts": ("m1", "m2"), "to": "model", "method": "ties", "scope": "all"},
    "ties": {"experts": ("t1", "t2"), "to": "model", "method": "average"},
    "no-ties": {"experts": ("t1", "t2"), "to": "model", "method": "average", "ties": False},
    "statistics": {"experts": ("m1", "m2"), "to": "model", "method": "regmean", "statistics": True},
    "adapter": {"experts": ("a1", "a2"), "to": "adapter", "method": "actmat", "keep": ["*.down_proj.weight"]},
    "adapter-statistics": {"experts": ("a1", "a2"), "to": "adapter", "method": "regmean", "statistics": True},
    "adapters": {"experts": ("a1", "a2"), "to": "model", "method": "task_arithmetic", "weights": [1.0, 2.0]},
}
"""Requests that are known to be granted."""


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest, inputs: Path) -> MergePlan:
    return planned(inputs, {"statistics": False} | EXAMPLES[request.param])


def test_ties_are_items_of_their_own(inputs: Path) -> None:
    plan = planned(inputs, {"statistics": False} | EXAMPLES["ties"])
    assert [i.tied_to for i in plan.items if i.action == "tie"] == [EMBEDDING]
    assert plan.by_name[EMBEDDING].target.tied == ("lm_head.weight",)


def test_the_time_is_at_least_that_of_the_traffic(example: MergePlan) -> None:
    assert example.seconds > example.write_bytes / 5e8


def test_what_decides_the_bytes_is_in_the_fingerprint(example: MergePlan) -> None:
    item, expert, recipe = example.items[0], example.experts[0], example.recipe
    target = replace(item.target, spec=replace(item.target.spec, name="other"))
    grown = replace(expert.files[0], size=1)
    changes: list[dict[str, Any]] = [
        {"recipe": recipe.model_copy(update={"seed": 7})},
        {"versions": {**example.versions, "torch": "0"}},
        {"items": (replace(item, target=target), *example.items[1:])},
        {"experts": (replace(expert, files=(grown, *expert.files[1:])), *example.experts[1:])},
        {"device": "cuda:1"},
    ]
    for fields in changes:
        assert replace(example, **fields).fingerprint() != example.fingerprint(), fields
    elsewhere = recipe.model_copy(update={"out": "elsewhere"})
    assert replace(example, recipe=elsewhere).fingerprint() == example.fingerprint()
