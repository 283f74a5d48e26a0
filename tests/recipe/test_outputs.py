"""Kinds of output: what recipes and flags mean, what means nothing, and what the experts decide."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_short_forms import write_adapter
from tests.helpers.merging import Family

from actmat.api.reading import read_recipe
from actmat.errors import MergeError, RecipeError
from actmat.recipe import Recipe, make_recipe, recipe_yaml
from actmat.recipe.output import AdapterOutput, AnyOutput, ExtractedOutput, ModelOutput, Vocabulary, with_output
from actmat.run.decide import decide
from actmat.run.locate import locate_inputs

BASE: dict[str, Any] = {"base": "base", "experts": ["math", "code"]}
BARE: dict[str, Any] = {"experts": ["math", "code"]}


def flagged(fields: dict[str, Any]) -> Recipe:
    """The recipe of a file's `output`, if that is given, and of flags."""
    file = {name: fields[name] for name in ("output",) if name in fields}
    return make_recipe(with_output(file, {name: value for name, value in fields.items() if name not in file}))


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        (BASE, ModelOutput()),
        (BARE, None),
        (BASE | {"to": "model", "config_from": "code"}, ModelOutput(config_from="code")),
        (BASE | {"vocabulary": "union", "files_from": "base"}, ModelOutput(vocabulary=Vocabulary(), files_from="base")),
        (BARE | {"files_from": "code"}, ModelOutput(files_from="code")),
        (BARE | {"rank": 8}, AdapterOutput(rank=8)),
        (BARE | {"to": "kohya", "ranks": "pattern"}, AdapterOutput(layout="kohya", ranks="pattern")),
        (BARE | {"to": "peft", "any_base": True}, AdapterOutput(layout="peft", any_base=True)),
        (BASE | {"to": "adapter", "rank": 8}, AdapterOutput(rank=8)),
        (BASE | {"output": "extracted", "others": "leave"}, ExtractedOutput(others="leave")),
        (BASE | {"to": None, "rank": None}, ModelOutput()),
        (BASE | {"output": "extracted", "rank": 8}, ExtractedOutput(rank=8)),
        (BASE | {"output": "peft"}, AdapterOutput(layout="peft")),
        (BASE | {"output": {"kind": "adapter", "rank": 4}, "rank": 8}, AdapterOutput(rank=8)),
        (BASE | {"output": AdapterOutput(rank=4), "to": "diffusers"}, AdapterOutput(rank=4, layout="diffusers")),
        (BASE | {"output": ExtractedOutput(rank=4)}, ExtractedOutput(rank=4)),
    ],
)
def test_what_flags_and_a_recipe_write(fields: dict[str, Any], output: AnyOutput | None) -> None:
    """Flags, those beside a file's, a text, a mapping; data and YAML give the same recipe again."""
    recipe = flagged(fields)
    assert recipe.output == output
    for data in (recipe.model_dump(), recipe.model_dump(mode="json", exclude_defaults=True), dict(recipe)):
        assert make_recipe(data) == recipe
    assert ("output" in recipe_yaml(recipe)) == (output not in (None, ModelOutput()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (BASE | {"rank": 8}, ("rank", "the output is a model")),
        (BASE | {"to": "model", "others": "leave"}, ("others", "the output is a model")),
        (BASE | {"to": "kohya", "others": "leave"}, ("others", "the output is an adapter")),
        (BARE | {"to": "adapter", "config_from": "code"}, ("config_from", "goes with a model", "an adapter")),
        (BASE | {"output": {"kind": "extracted", "any_base": True}}, ("any_base", "an extracted adapter")),
        (BASE | {"output": {"rank": 8}}, ("output: name its kind: model, adapter, extracted",)),
        (BASE | {"to": "onnx"}, ("output", "'onnx'", "model, adapter, extracted")),
        (BASE | {"output": {"kind": "model", "files_form": "x"}}, ("no field 'files_form'", "'files_from'")),
        (BASE | {"output": ["model"]}, ("output",)),
        (BASE | {"vocabulary": {"sorce": "base"}}, ("no field 'sorce'", "'source'")),
        (
            BASE | {"vocabulary": {"pad_to_multiple_of": 16385}},
            ("vocabulary.pad_to_multiple_of", "less than or equal to 16384", "found '16385'"),
        ),
        (BASE | {"vocabulary": {"pad_to_multiple_of": 10**30}}, ("less than or equal to 16384",)),
    ],
)
def test_what_means_nothing_cannot_be_built(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        flagged(fields)
    assert [w for w in words if w not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["rank", "to", "vocabulary"])
def test_fields_of_an_output_stand_in_it(name: str) -> None:
    with pytest.raises(RecipeError, match=f"no field '{name}'"):
        make_recipe(BASE | {name: "x"})


def test_an_error_has_the_line_of_the_field(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("base: b\nexperts: [e]\noutput:\n  kind: adapter\n  rank: -1\n")
    with pytest.raises(RecipeError, match=f"{file}:5: output.rank: Input should be greater than 0"):
        read_recipe(file)
    assert read_recipe(file, {"rank": 8}).output == AdapterOutput(rank=8)


def test_the_experts_decide_once(tmp_path: Path) -> None:
    """Adapters give an adapter, models a model, where nothing is said; an adapter of models is an extraction."""
    family = Family.make(tmp_path, layers=1)
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, seed=seed)
    base, lora = str(family.base), [str(tmp_path / "one"), str(tmp_path / "two")]
    full = [str(e) for e in family.experts]

    def kind(fields: dict[str, Any]) -> Recipe:
        recipe = flagged({"method": "actmat", **fields})
        with locate_inputs(recipe) as given:
            return decide(given)

    assert kind({"experts": lora}).output == AdapterOutput()
    assert kind({"base": base, "experts": lora}).output == ModelOutput()
    assert kind({"base": base, "experts": lora, "to": "adapter", "rank": 2}).output == AdapterOutput(rank=2)
    assert kind({"base": base, "experts": full, "to": "peft", "rank": 2}).output == ExtractedOutput(rank=2)
    averaged = kind({"experts": full, "method": "average"})
    assert (averaged.base, averaged.output) == (full[0], ModelOutput())
    for fields, words in (
        ({"experts": full}, "--base must be given"),
        ({"experts": lora, "to": "model"}, "A full model is merged into a base"),
        ({"base": base, "experts": full, "to": "adapter"}, "works on adapters only"),
        ({"experts": full, "to": "extracted", "rank": 2}, "give --base"),
    ):
        with pytest.raises(MergeError, match=words):
            kind(fields)
