"""Recipes from YAML: lines of mistakes, paths, numbers, overrides, and files made to hurt."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actmat.api.reading import read_recipe
from actmat.errors import RecipeError
from actmat.recipe import make_recipe, parse_option
from actmat.recipe.load import recipe_yaml


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    return list(caught.value.problems)


MINIMAL = "base: org/base\nexperts: [org/one, org/two]\n"


def test_a_minimal_recipe_has_the_documented_defaults(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, MINIMAL))
    assert recipe.labels == ("one", "two")
    assert (recipe.method, recipe.scale, recipe.scope, recipe.dtype, recipe.out) == (
        "auto",
        1.0,
        "linear",
        None,
        None,
    )
    assert recipe.weights == (1.0, 1.0)


def test_every_mistake_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
base: org/base
experts:
  - org/one
  - path: org/two
    wieght: 2
scope: everything
rules:
  - match: "*.mlp.*"
    keep: base
    scale: 2
  - method: ties
compute_dtype: float16
sede: 3
""",
    )
    found = problems(path)
    fields = "Fields: path, name, weight, options, statistics, stacks"
    assert f"{path}:5: experts.1.wieght: there is no field 'wieght'. Did you mean 'weight'? {fields}" in found
    assert any(p.startswith(f"{path}:6: scope: ") for p in found)
    assert any(p.startswith(f"{path}:8: rules.0: a rule either keeps") for p in found)
    assert f"{path}:11: rules.1.match: this field is required" in found
    assert any(p.startswith(f"{path}:12: compute_dtype") for p in found)
    assert any(p.startswith(f"{path}:13: sede: ") and "Did you mean 'seed'?" in p for p in found)


def test_a_key_given_twice(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "scale: 1\noptions: {rtol: 1e-6, rtol: 1e-3}\nscale: 2\n")
    assert sorted(problems(path)) == [f"{path}:4: 'rtol' is given twice", f"{path}:5: 'scale' is given twice"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found NoneType"),
        ("- a\n- b\n", "found list"),
        ("base: [\n", "not valid YAML"),
        ("base: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "not valid YAML"),
        ("base: a\n", "experts: this field is required"),
        ("base: b\nexperts: []\n", "experts"),
        ("base: b\nexperts: [x/e, y/e]\n", "distinct names; e occurs more than once"),
        ("base: b\nexperts: [e]\nfiles_from: f\n", "Write output: {kind: model, files_from: ...}"),
        ("base: b\nexperts: [e]\noutput: {kind: model, files_from: f}\n", "files_from names 'f'"),
        ("base: b\nexperts: [e]\nscale: .inf\n", "scale"),
        ("base: b\nexperts: [{path: e, weight: .nan}]\n", "experts.0.weight"),
        ("1: 2\n", "base"),
    ],
)
def test_not_a_recipe(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(write(tmp_path, text))
    assert says in str(caught.value)


@pytest.mark.parametrize("value", [".inf", "-.INF", ".nan", "1e999", "[1, .nan]", "{a: {b: .inf}}"])
def test_options_that_are_not_finite_are_refused_with_their_line(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, MINIMAL + f"options:\n  rtol: 1e-5\n  density: {value}\n")
    line = path.read_text().splitlines().index(f"  density: {value}") + 1
    with pytest.raises(RecipeError, match=rf"{path}:{line}: options.density: found -?(inf|nan), expected finite"):
        read_recipe(path)
    path = write(tmp_path, MINIMAL + f"rules:\n- match: '*'\n  options:\n    density: {value}\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(RecipeError, match=rf"{path}:{line}: rules.0.options.density: found "):
        read_recipe(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Cannot read the recipe"):
        read_recipe(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="Cannot read the recipe"):
        read_recipe(tmp_path / "binary.yaml")


@pytest.mark.parametrize("value", ["&x [*x]", "[&x 1, *x]"])
def test_an_alias_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, MINIMAL + f"options: {{x: {value}}}\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(RecipeError, match=rf"{path}:{line}: an alias .* is not supported: write the value out"):
        read_recipe(path)


def test_numbers_that_yaml_1_1_takes_for_text(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, MINIMAL + "options: {rtol: 1e-6, list: [1e3, 2.5E-1, -1e+2], name: e5}\n"))
    assert recipe.options == {"rtol": 1e-6, "list": [1000.0, 0.25, -100.0], "name": "e5"}


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "recipes" / "near").mkdir()
    path = tmp_path / "recipes" / "recipe.yaml"
    path.write_text("base: ../models\nexperts: [near, {path: ./far, weight: 2}, org/hub, /abs/x]\nout: merged\n")
    monkeypatch.chdir("/")
    recipe = read_recipe(path)
    folder = tmp_path / "recipes"
    assert recipe.base == str(folder / "../models")
    assert [e.path for e in recipe.experts] == [str(folder / "near"), str(folder / "far"), "org/hub", "/abs/x"]
    assert recipe.experts[1].weight == 2
    assert recipe.out == str(folder / "merged")


def test_flags_win_over_the_file_and_are_not_blamed_on_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "scale: 0.5\nout: there\n")
    recipe = read_recipe(path, {"scale": 2.0, "out": "here"})
    assert (recipe.scale, recipe.out) == (2.0, "here")
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, {"scale": "much"})
    assert caught.value.problems[0].startswith("scale: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rtol=1e-6", ("rtol", [1e-6])),
        ("rtol = 1e-6, 1e-4", ("rtol", [1e-6, 1e-4])),
        ("k=3", ("k", [3])),
        ("k=3,4.5", ("k", [3, 4.5])),
        ("on=true,false", ("on", [True, False])),
        ("rtol=null", ("rtol", [None])),
        ("name=sum,mean", ("name", ["sum", "mean"])),
        ("list=[0.2, 0.4]", ("list", [[0.2, 0.4]])),
        ("x=a=b", ("x", ["a=b"])),
    ],
)
def test_parse_option(text: str, expected: tuple[str, list[Any]]) -> None:
    name, values = parse_option(text)
    assert (name, values) == expected
    assert [type(v) for v in values] == [type(v) for v in expected[1]]


@pytest.mark.parametrize("text", ["rtol", "=3", " =3", "x={a", "x=[1", "x=*a"])
def test_parse_option_refuses(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_option(text)


NAMES = st.text("abcxyz_-.*", min_size=1, max_size=8)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine, drawing takes seconds
@given(
    st.fixed_dictionaries(
        {"base": NAMES, "experts": st.lists(NAMES, min_size=1, max_size=3, unique=True)},
        optional={
            "scale": st.floats(-2, 2, allow_nan=False),
            "scope": st.sampled_from(["linear", "paper", "all"]),
            "options": st.dictionaries(NAMES, st.one_of(st.integers(), st.booleans(), NAMES, st.none()), max_size=3),
            "keep": st.lists(NAMES, max_size=2),
            "rules": st.lists(st.fixed_dictionaries({"match": NAMES, "scale": st.floats(0, 1)}), max_size=2),
            "seed": st.integers(0, 2**40),
        },
    )
)
def test_what_is_written_is_read_again(fields: dict[str, Any]) -> None:
    import yaml

    fields = fields | {"experts": [{"path": p, "name": f"expert{i}"} for i, p in enumerate(fields["experts"])]}
    recipe = make_recipe(fields)
    assert make_recipe(yaml.safe_load(recipe_yaml(recipe))) == recipe


def test_the_written_recipe_tells_no_place_and_no_default() -> None:
    recipe = make_recipe({"base": "b", "experts": ["e"], "out": "somewhere", "scale": 1.0})
    assert recipe_yaml(recipe) == "base: b\nexperts:\n- path: e\n"


def test_labels() -> None:
    experts = ["org/model@rev", "./dir/expert/", {"path": "x", "name": "math"}]
    assert make_recipe({"base": "b", "experts": experts}).labels == ("model", "expert", "math")
