"""Conversion of mergekit's configurations, by text only: structure, levels, filters, notes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.merging import Family, actmat

from actmat.api.reading import read_recipe
from actmat.errors import RecipeError
from actmat.extras.mergekit import convert, is_mergekit
from actmat.recipe import make_recipe
from actmat.recipe.text import parse_yaml


def converted(text: str) -> dict[str, Any]:
    fields = convert(parse_yaml(text)[1])
    make_recipe(fields)
    return fields


def problems(text: str) -> str:
    with pytest.raises(RecipeError) as refused:
        converted(text)
    return str(refused.value)


def slices(*parts: str, method: str = "linear", more: str = "") -> str:
    """A configuration with slices; a part is `model first end [parameters], ...`."""
    lines = [f"merge_method: {method}", "slices:"]
    for part in parts:
        lines.append("- sources:")
        for source in part.split(";"):
            model, first, end, *parameters = source.split(maxsplit=3)
            lines.append(
                f"  - {{model: {model}, layer_range: [{first}, {end}], parameters: {{{''.join(parameters)}}}}}"
            )
    return "\n".join([*lines, more])


def test_models_become_experts_of_the_base() -> None:
    fields = converted(
        """
merge_method: ties
base_model: {model: {path: org/base, revision: v1}}
models:
- model: org/base@v1
- {model: ./math, parameters: {weight: 0.5, density: [1, 0.1]}}
- {model: other/math, parameters: {weight: "5e-1"}}
parameters: {normalize: false, int8_mask: true, density: 0.4, lambda: 0.9}
dtype: torch.bfloat16
out_dtype: float32
"""
    )
    assert fields["base"] == "org/base@v1"
    assert fields["experts"] == [
        {"path": "./math", "weight": 0.5, "options": {"density": [1, 0.1]}},
        {"path": "other/math", "name": "math-2", "weight": 0.5, "options": {"density": 0.4}},
    ]
    assert fields["options"] == {"reduce": "sum", "variant": "mergekit"}
    assert (fields["scale"], fields["dtype"], fields["scope"]) == (0.9, "float32", "all")
    assert any("'int8_mask' saves memory" in n for n in fields["notes"])
    assert any("rounded to float32 once" in n for n in fields["notes"])


def test_levels_and_filters_fall_through() -> None:
    text = """
merge_method: linear
modules:
  default:
    models:
    - {model: a, parameters: {weight: [{filter: q_proj, value: 1}]}}
    - {model: b, parameters: {weight: {filter: "*", value: 3}}}
    parameters: {weight: [{filter: mlp, value: 2}]}
parameters: {weight: 0.5}
"""
    fields = converted(text)
    first = [{"match": "*q_proj*", "value": 1}, {"match": "*mlp*", "value": 2}, {"value": 0.5}]
    assert [e["weight"] for e in fields["experts"]] == [first, 3]
    assert fields["base"] == "a"


def test_signs_of_globs_in_a_filter_are_literal() -> None:
    text = (
        "{merge_method: linear, models: [{model: a, parameters: {weight: [{filter: 'x[0]*', value: 1}, {value: 2}]}}]}"
    )
    assert converted(text)["experts"][0]["weight"][0]["match"] == r"*x\[0\]\**"


def test_filters_on_layers_of_a_source_name_those_of_the_output() -> None:
    weight = "weight: [{filter: layers.3.mlp, value: 2}, {filter: layers.1, value: [5, 6]}, {value: 1}]"
    fields = converted(slices("a 0 2 weight: 1", f"b 1 4 {weight}"))
    entries = fields["experts"][0]["weight"]
    assert fields["base"] == "a[0:2] + b[1:4]"
    assert {"match": "*layers.4.mlp*", "layers": [4, 5], "value": 2} in entries
    assert {"match": "*layers.2.*", "layers": [2, 3], "value": 5} in entries, (
        "'layers.1' is a prefix: only layer 1 here"
    )
    assert not [e for e in entries if e.get("layers") == "after" and "layers" in e.get("match", "")]
    assert entries[-1] == {"layers": "after", "value": 1}


def test_gradients_run_over_one_slice() -> None:
    fields = converted(
        slices("a 0 2; b 0 2", "a 2 5; b 2 5", method="slerp", more="base_model: b\nparameters: {t: [0, 1]}")
    )
    layers = [e for e in fields["options"]["t"] if isinstance(e["layers"], list)]
    assert layers == [{"layers": [0, 2], "value": [0, 1]}, {"layers": [2, 5], "value": [0, 1]}]
    ends = [(e["layers"], e["value"]) for e in fields["options"]["t"] if isinstance(e["layers"], str)]
    assert ends == [("before", 0), ("after", 0)]
    assert (fields["base"], fields["experts"][0]["path"]) == ("b[0:5]", "a[0:5]"), "consecutive layers are joined"


def test_norm_and_head_follow_the_mistake_with_a_note() -> None:
    fields = converted(slices("a 0 2 weight: 1", "b 2 4 weight: 1; c 2 4 weight: 3"))
    assert fields["experts"][1]["weight"] == [
        {"layers": "before", "value": 0.0},
        {"layers": [0, 2], "value": 0.0},
        {"layers": [2, 4], "value": 3},
        {"layers": "after", "value": 0.0},
    ]
    assert any("final norm and head omit c" in n and "which is reproduced" in n for n in fields["notes"])


def test_passthrough_is_a_copy() -> None:
    fields = converted(slices("a 0 3", "b 1 4", method="passthrough", more="dtype: float16"))
    assert fields.keys() == {"base", "scope", "dtype", "notes"}
    assert fields["base"] == "a[0:3] + b[1:4]"
    whole = converted("{merge_method: passthrough, models: [{model: a}]}")
    assert whole["experts"] == [{"path": "a", "name": "copy"}]


def test_uneven_slices_of_a_method_with_presence_only() -> None:
    fields = converted(slices("a 0 2; b 0 2", "a 2 4", method="karcher"))
    assert fields["experts"][1]["weight"] == [
        {"layers": "before", "value": 1.0},
        {"layers": [0, 2], "value": 1.0},
        {"layers": [2, 4], "value": 0.0},
        {"layers": "after", "value": 0.0},
    ]


@pytest.mark.parametrize("method", ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"])
def test_normalize_is_the_recipes(method: str) -> None:
    models = "[{model: a, parameters: {weight: 1}}]"
    text = f"{{merge_method: {method}, base_model: b, models: {models}, parameters: {{normalize: true}}}}"
    assert converted(text)["normalize"] is True


def test_multislerp_is_no_step_of_the_karcher_mean() -> None:
    models = "[{model: a, parameters: {weight: 0.5}}, {model: b, parameters: {weight: 0.3}}]"
    fields = converted(
        f"{{merge_method: multislerp, base_model: c, models: {models}, parameters: {{normalize_weights: false}}}}"
    )
    assert (fields["method"], fields["options"], fields["scale"]) == ("karcher", {"max_iter": 0, "of": "deltas"}, 0.8)
    with pytest.raises(RecipeError, match="needs a base model and one weight per model"):
        converted(f"{{merge_method: multislerp, models: {models}, parameters: {{normalize_weights: false}}}}")


def test_densities_are_clipped_as_mergekit_clips_them() -> None:
    models = "[{model: a, parameters: {weight: 1, density: 1.5}}, {model: c, parameters: {weight: 1, density: -0.2}}]"
    fields = converted(f"{{merge_method: ties, base_model: b, models: {models}}}")
    assert [e["options"]["density"] for e in fields["experts"]] == [1.0, 0.0]
    assert any("outside [0, 1]" in note for note in fields["notes"])
    gradient = models.replace("1.5", "[1.5, 0.5]")
    with pytest.raises(RecipeError, match="clips it layer by layer"):
        converted(f"{{merge_method: ties, base_model: b, models: {gradient}}}")


def test_a_base_model_of_the_slices_counts_as_one_of_all() -> None:
    def sources(base: str, first: int) -> str:
        named = [f"{{model: {m}, layer_range: [{first}, {first + 1}], parameters: {{weight: 1}}}}" for m in "abc"]
        return f"{{{base}sources: [{', '.join(named)}]}}"

    both = f"{sources('base_model: c, ', 0)}, {sources('base_model: c, ', 1)}"
    fields = converted(f"{{merge_method: nuslerp, slices: [{both}]}}")
    assert (fields["options"]["of"], len(fields["experts"])) == ("deltas", 2)
    mixed = f"{sources('base_model: c, ', 0)}, {sources('', 1)}"
    with pytest.raises(RecipeError, match="slices with and without a base model have no counterpart for 'multislerp'"):
        converted(f"{{merge_method: multislerp, slices: [{mixed}]}}")


def test_the_model_that_stands_in_for_a_base_is_not_taken_for_one() -> None:
    models = "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]"
    assert converted(f"{{merge_method: linear, {models}}}")["measured_from"] == "a"
    assert "measured_from" not in converted(f"{{merge_method: ties, base_model: c, {models}}}")


def test_an_adapter_of_the_base_is_an_expert() -> None:
    text = "{merge_method: task_arithmetic, base_model: b, models: [{model: b+lora, parameters: {weight: 1}}]}"
    assert converted(text)["experts"] == [{"path": "lora"}]
    assert converted(text.replace("b+lora", "x+lora"))["experts"] == [{"path": "x+lora"}]
    stacked = converted(slices("a+lora 0 2 weight: 1; c 0 2 weight: 1"))
    assert (stacked["base"], stacked["experts"][0]["path"]) == ("c[0:2]", "a+lora[0:2]")
    mapped = text.replace("model: b+lora", "model: {model: {path: x, revision: v2}, lora: {path: lora}}")
    assert converted(mapped)["experts"] == [{"path": "x@v2+lora"}]


def test_ignored_keys_are_noted_with_near_names() -> None:
    text = "{merge_method: linear, dtpye: x, models: [{model: a, wieght: 1, parameters: {weight: 1, wheight: 2}}]}"
    notes = converted(text)["warnings"]
    assert any("'dtpye' is ignored, as mergekit ignores it. Did you mean 'dtype'?" in n for n in notes)
    assert any("'models.0.parameters.wheight' is ignored" in n for n in notes)


def test_a_missing_parameter_names_the_one_that_is_nearly_right() -> None:
    text = "{merge_method: ties, base_model: b, models: [{model: a, parameters: {wieght: 1}}]}"
    found = problems(text)
    assert "needs 'weight' for every tensor" in found
    assert "'models.0.parameters.wieght' is ignored, as mergekit ignores it. Did you mean 'weight'?" in found


def test_ignored_keys_of_a_tokenizer_are_noted() -> None:
    token = "{source: {kind: zero, knid: x}, froce: true}"
    tokenizer = f"{{source: base, padding: 8, tokens: {{x: {token}}}}}"
    text = f"{{merge_method: linear, models: [{{model: a, parameters: {{weight: 1}}}}], tokenizer: {tokenizer}}}"
    fields = converted(text)
    notes = [*fields["notes"], *fields["warnings"]]
    for name in ("tokenizer.padding", "tokenizer.tokens.x.froce", "tokenizer.tokens.x.source.knid"):
        assert any(f"'{name}' is ignored" in n for n in notes), name
    assert "expected a mapping with 'source', found 'union'" in problems(
        "{merge_method: linear, models: [{model: a}], tokenizer: union}"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{merge_method: linear}", "found none"),
        ("{merge_method: linear, models: 3}", "expected a list with at least one entry"),
        ("{merge_method: linear, models: [a]}", "expected a mapping with 'model'"),
        ("{merge_method: linear, models: [{model: 3}]}", "expected the path or hub id of a model"),
        ("{merge_method: linear, models: [{model: a, parameters: {weight: x}}]}", "expected a number or a list"),
        ("{merge_method: linear, models: [{model: a, parameters: 3}]}", "expected a mapping of names"),
        (
            "{merge_method: linear, models: [{model: a, parameters: {weight: 1}}], dtype: int8}",
            "expected one of float64",
        ),
        ("{merge_method: linear, slices: [{sources: [{model: a}]}]}", "layer_range: [first, end]"),
        ("{merge_method: linear, slices: [3]}", "expected a mapping with 'sources'"),
        ("{merge_method: linear, modules: {x: {models: []}, y: {}}}", "models with several modules"),
        ("{merge_method: linear, modules: {x: {}}}", "exactly one of 'models' and 'slices'"),
        ("{merge_method: passthrough, models: [{model: a}, {model: b}]}", "takes exactly 1 model(s)"),
        ("{merge_method: linear, models: [{model: a, parameters: {weight: 1}}, {model: a}]}", "listed twice"),
        (
            "{merge_method: karcher, models: [{model: a}], parameters: {tol: [0, 1]}}",
            "'tol' differs between tensors",
        ),
        (
            "{merge_method: linear, models: [{model: a, parameters: {weight: 1}}], "
            "parameters: {normalize: [{filter: mlp, value: true}, {value: false}]}}",
            "'normalize' differs between tensors",
        ),
        ("{gate_mode: hidden, experts: [{source_model: a}]}", "build the mixture with 'mergekit-moe"),
        (
            slices("a 0 2; b 0 2; c 0 2", "a 2 4; b 2 4", method="sce", more="base_model: a"),
            "different numbers of models",
        ),
    ],
)
def test_what_cannot_be_converted(text: str, said: str) -> None:
    assert said in problems(text)


def test_all_problems_of_a_file_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "mergekit.yml"
    file.write_text(
        "merge_method: tise\nmodels:\n- model: a\n  parameters: 3\n- parameters: {}\nslices: []\ndtype: int8\n"
        "base_model: 3\n"
    )
    with pytest.raises(RecipeError) as refused:
        read_recipe(file)
    assert f"{file}:1: merge_method: mergekit has no method 'tise'" in str(refused.value)
    assert "exactly one of" in str(refused.value)


def test_detection() -> None:
    assert is_mergekit({"merge_method": "x"})
    assert is_mergekit({"experts": [{"source_model": "a"}]})
    assert not is_mergekit({"base": "a", "experts": ["b", {"path": "c"}]})


def test_import_prints_a_recipe_that_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mergekit.yml").write_text(
        "merge_method: slerp\nbase_model: ./base\nmodels: [{model: ./base}, {model: ./expert0}]\n"
        "parameters: {t: [{filter: mlp, value: [0.2, 0.8]}, {value: 0.5}]}\n"
    )
    said = actmat(["plan", "mergekit.yml", "--as-recipe"], code=0)
    assert "note: converted from a mergekit configuration (slerp)" in said.err
    (tmp_path / "recipe.yaml").write_text(said.out)
    for file in ("mergekit.yml", "recipe.yaml"):
        done = actmat(["merge", file, "--out", f"out-{file}", "--threads", "1"], code=0)
        assert "note: converted from a mergekit configuration (slerp)" in done.out
    one, two = ((tmp_path / f"out-{f}" / "model.safetensors").read_bytes() for f in ("mergekit.yml", "recipe.yaml"))
    assert one == two
    assert family.base.exists()
    as_json = actmat(["plan", "mergekit.yml", "--json", "--quiet", "--as-recipe"])
    assert (as_json.code, as_json.err) == (0, "")
    assert '"method": "slerp"' in as_json.out.replace('":"', '": "')


def test_a_recipe_of_ours_is_printed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("base: a\nexperts: [b]\n")
    printed = actmat(["plan", tmp_path / "r.yaml", "--as-recipe"])
    assert (printed.code, printed.out) == (0, "base: a\nexperts:\n- path: b\n")
    with pytest.raises(RecipeError, match="Cannot read"):
        read_recipe(tmp_path / "missing.yml")
