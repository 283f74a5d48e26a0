"""The form of the page: recipes, groups, commands that do the same."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.merging import Family
from typer.main import get_command

from actmat.cli.main import app
from actmat.errors import RecipeError
from actmat.extras.ui.form import command_of, groups_in, recipe_of, settings_of, tune_command
from actmat.extras.ui.jobs import Jobs
from actmat.extras.ui.questions import Questions
from actmat.recipe import load_recipe, make_recipe
from actmat.settings import RunSettings


@pytest.fixture
def form(samples: Family) -> dict[str, Any]:
    experts = [{"path": str(e)} for e in samples.experts]
    return {"recipe": {"base": str(samples.base), "experts": experts, "method": "ties"}, "out": "merged"}


def test_groups_cover_what_the_scale_reaches(form: dict[str, Any]) -> None:
    groups = {g["name"]: g["tensors"] for g in groups_in(form | {"grouping": "kind"})}
    assert groups == {"attention": 2, "mlp": 4, "other": 1}
    depth = [g["name"] for g in groups_in(form | {"grouping": "depth"})]
    assert set(depth) == {"first", "middle", "outside"}


def test_scales_of_groups_become_rules_after_those_of_the_recipe(form: dict[str, Any]) -> None:
    form["recipe"]["rules"] = [{"match": ["*.q_proj.weight"], "scale": 2.0}]
    recipe = recipe_of(form | {"grouping": "kind", "scales": {"mlp": 0.5, "other": None}})
    assert [r.scale for r in recipe.rules] == [2.0, 0.5]
    assert all("mlp" in pattern for pattern in recipe.rules[1].match)


def test_unknown_groups_and_settings_are_named(form: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"no group of layers 'nose'; groups: attention, mlp, other"):
        recipe_of(form | {"grouping": "kind", "scales": {"nose": 1.0}})
    with pytest.raises(RecipeError, match="Layers are grouped by"):
        recipe_of(form | {"grouping": "colour", "scales": {"mlp": 1.0}})
    with pytest.raises(RecipeError, match="no setting 'executor'"):
        settings_of({"settings": {"executor": "ray"}})
    form["recipe"]["scale"] = [0.0, 1.0]
    with pytest.raises(RecipeError, match="scale is one number"):
        recipe_of(form | {"grouping": "kind", "scales": {"mlp": 1.0}})


def parsed(command: str) -> dict[str, Any]:
    """What the command line would read: parameters that are given, by name."""
    words = shlex.split(command)
    assert words[:2] == ["actmat", "merge"]
    group = get_command(app)
    with group.make_context("actmat", words[1:], resilient_parsing=True) as context:
        _, merge, rest = group.resolve_command(context, words[1:])
        with merge.make_context("merge", rest, parent=context) as inner:
            return {k: v for k, v in inner.params.items() if v not in (None, [], (), False)}


def test_the_command_of_a_search_is_one_that_tune_reads() -> None:
    recipe = make_recipe({"base": "b", "experts": ["x/math", {"path": "a b", "name": "code"}], "out": "o"})
    words = shlex.split(tune_command(recipe))
    group = get_command(app)
    with group.make_context("actmat", words[1:], resilient_parsing=True) as context:
        name, tune, rest = group.resolve_command(context, words[1:])
        assert tune is not None
        with tune.make_context("tune", rest, parent=context) as inner:
            given = inner.params
    assert (name, given["base"], given["experts"]) == ("tune", "b", ["x/math", "code=a b"])
    assert given["data"] == ["math=math.jsonl", "code=code.jsonl"]
    assert given["out"] == "o"


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"method": "ties", "options": {"density": 0.3}, "scale": 0.5}, {"threads": 3, "diagnose": True}),
        ({"dtype": "bfloat16", "to": "model", "scope": "all"}, {"max_memory": "4GB", "overwrite": True}),
        ({"experts": [{"path": "a b", "name": "x", "weight": 0.25}, "c"]}, {"device": "cuda:0"}),
    ],
)
def test_the_command_line_reads_back_what_the_form_says(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    from actmat.cli.flags import RecipeFlags

    recipe = make_recipe({"base": "base", "experts": ["math", "code"], "out": "merged"} | fields)
    command, file = command_of(recipe, RunSettings(**settings))
    assert file == ""
    given = parsed(command)
    names = {"expert": "experts", "option": "options"}
    flags = RecipeFlags({names.get(k, k): v for k, v in given.items()})
    known = set(type(recipe).model_fields) | {"weight", "statistics"}
    (again,) = RecipeFlags({k: v for k, v in flags.values.items() if k in known}).recipes(None)
    assert again == recipe
    for name, value in settings.items():
        assert given[name] == value


def test_what_flags_cannot_say_goes_through_a_file(form: dict[str, Any], tmp_path: Path) -> None:
    form |= {"grouping": "kind", "scales": {"mlp": 0.5}}
    command, file = command_of(recipe_of(form), RunSettings())
    assert command == "actmat merge recipe.yaml --out merged"
    (tmp_path / "recipe.yaml").write_text(file)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe_of(form | {"out": ""})


def test_plan_says_all_problems_and_still_the_command(form: dict[str, Any], tmp_path: Path) -> None:
    questions = Questions([], Jobs(tmp_path))
    fine = questions.answer("plan", {"form": form})["answer"]
    assert sum(r["count"] for r in fine["rows"]) == 11
    assert fine["command"].startswith("actmat merge -b ")
    form["recipe"]["experts"] += [{"path": str(tmp_path / "one")}, {"path": str(tmp_path / "two")}]
    found = questions.answer("plan", {"form": form})["answer"]
    assert len(found["problems"]) == 2
    assert "-e" in found["command"]


def test_a_saved_recipe_is_read_again_from_anywhere(
    form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(form["recipe"]["base"])
    monkeypatch.chdir(base.parent)
    form["recipe"]["base"] = base.name
    questions = Questions([], Jobs(tmp_path))
    file = tmp_path / "deep" / "recipe.yaml"
    assert "cannot be written" in questions.answer("save", {"path": str(file), "form": form})["headline"]
    file.parent.mkdir()
    assert questions.answer("save", {"path": str(file), "form": form})["ok"]
    again = questions.answer("load", {"path": str(file)})["answer"]
    assert again["recipe"]["base"] == str(base)
    assert again["recipe"]["method"] == "ties"
    assert "File exists" in questions.answer("save", {"path": str(file), "form": form})["headline"]


def test_folders_say_what_they_hold(samples: Family, tmp_path: Path) -> None:
    from actmat.extras.ui.places import folder_of

    (tmp_path / "recipe.yaml").write_text("base: b")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "base").symlink_to(samples.base)
    found = folder_of(str(tmp_path))
    kinds = {e["name"]: e["kind"] for e in found["entries"]}
    assert kinds == {"adapter": "adapter", "base": "checkpoint", "family": "", "recipe.yaml": "recipe"}
    with pytest.raises(Exception, match="expected a folder that can be read"):
        folder_of(str(tmp_path / "gone"))
