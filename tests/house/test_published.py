"""The public surface is the recorded one; schemas describe real files; files of other versions are refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from docs.published import SURFACE, WRITTEN, published, surface
from jsonschema import Draft202012Validator
from tests.helpers.docs_fixture import write_models
from tests.helpers.repository import ROOT

import actmat
from actmat.errors import CheckpointError
from actmat.recipe import make_recipe
from actmat.recipe.text import parse_yaml
from actmat.report.manifest import read_manifest

SHORT_FORMS = """
base: base
experts: [experts/math, {path: experts/code, name: code, weight: 1e-1, stacks: "e_i_o, rank_major"}]
method: dare_ties
options: {density: [{match: "*.mlp.*", value: [0, 1]}, {value: 0.5}]}
scale: [0, 0.5]
rules: [{match: "*.down_proj.weight", options: {rtol: 1e-6}}]
post: isotropize:mean=rank
keep: "*norm*"
mute: AM402
output: {kind: model, vocabulary: union}
"""


def difference(recorded: Any, found: Any, place: str = "") -> list[str]:
    """Places at which two surfaces differ."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = sorted({*recorded, *found})
        return [d for n in names for d in difference(recorded.get(n), found.get(n), f"{place}{n}: ")]
    if isinstance(recorded, list) and isinstance(found, list):
        gone, new = ([x for x in a if x not in b] for a, b in ((recorded, found), (found, recorded)))
        return [f"{place}{word} {x}" for word, some in (("gone", gone), ("new", new)) for x in some]
    return [] if recorded == found else [f"{place}recorded {recorded}, found {found}"]


def invalid(kind: str, data: Any) -> list[str]:
    """Problems of a file by its published schema."""
    schema = json.loads(published(kind))
    Draft202012Validator.check_schema(schema)
    return [f"{e.json_path}: {e.message[:200]}" for e in Draft202012Validator(schema).iter_errors(data)]


def test_the_public_surface_is_the_recorded_one() -> None:
    found = difference(json.loads(SURFACE.read_text()), json.loads(json.dumps(surface())))
    assert not found, (
        "the public surface changed. A name that goes, or a signature that breaks callers, needs a deprecation "
        "(docs/limits.md) and a line in CHANGELOG.md. Then: python -m docs.published\n" + "\n".join(found)
    )


def test_no_schema_of_another_version_is_published() -> None:
    assert {p.name for p in (ROOT / "docs" / "schemas").iterdir()} == {p.name for p in WRITTEN}


# Real files


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model with its report, a merged adapter and an extracted one."""
    root = tmp_path_factory.mktemp("merges")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_models(root)
        experts, adapters = ["experts/math", "experts/code"], ["adapters/math", "adapters/code"]
        actmat.merge("base", experts, method="ties", post=["isotropize"], out="model", diagnose=True)
        actmat.merge(experts=adapters, method="average", to="peft", out="adapter", diagnose=True)
        actmat.extract("base", "experts/math", rank=4, out="extracted")
    return root


@pytest.mark.parametrize("out", ["model", "adapter", "extracted"])
def test_a_manifest_and_its_recipe_follow_the_schemas(merges: Path, out: str) -> None:
    found = read_manifest(merges / out)
    assert invalid("manifest", found) == []
    assert invalid("recipe", found["recipe"]) == []
    assert invalid("manifest", found | {"actmat_manifest": 2}) == ["$.actmat_manifest: 1 was expected"]


@pytest.mark.parametrize("out", ["model", "adapter"])
def test_a_report_follows_the_schema(merges: Path, out: str) -> None:
    found = json.loads((merges / out / "report.json").read_text())
    assert invalid("report", found) == []
    assert len(invalid("report", found | {"extra": 1})) == 1
    assert len(invalid("report", {k: v for k, v in found.items() if k != "findings"})) == 1


def test_a_plan_follows_the_schema(merges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(merges)
    for fields in ({"base": "base", "experts": ["experts/math", "experts/code"]}, {"experts": ["adapters/math"]}):
        found = json.loads(json.dumps(actmat.plan(**fields).to_json()))
        assert invalid("plan", found) == []
        assert invalid("plan", found | {"actmat_plan": 2}) == ["$.actmat_plan: 1 was expected"]


def test_every_form_of_a_recipe_follows_the_schema() -> None:
    data = parse_yaml(SHORT_FORMS)[1]
    recipe = make_recipe(data)
    assert recipe.experts[1].weight == 0.1
    assert invalid("recipe", data) == []
    assert invalid("recipe", json.loads(recipe.model_dump_json())) == []
    assert len(invalid("recipe", data | {"metod": "ties"})) == 1
    assert len(invalid("recipe", data | {"scope": "most"})) == 1


def test_a_manifest_of_another_version_is_refused_with_both_numbers(merges: Path, tmp_path: Path) -> None:
    shutil.copytree(merges / "model", tmp_path / "model")
    path = tmp_path / "model" / "actmat_manifest.json"
    path.write_text(path.read_text().replace('"actmat_manifest": 1', '"actmat_manifest": 2', 1))
    with pytest.raises(CheckpointError, match="layout 2; this version of actmat reads layout 1"):
        read_manifest(tmp_path / "model")


OF_OTHERS = re.compile(
    r"\b(vllm|ray|python|pip|cmd|llama-gguf-split|start|zero_to_fp32)\b|force-reinstall|lora|num-cpus|SPELLINGS"
)
"""Marks of lines of code about flags of other programs."""


def test_flags_that_messages_name_exist() -> None:
    """A fix that is printed works: no text names a flag that went, but those that say what to type instead."""
    known = {*re.findall(r"--[a-z][a-z0-9-]+", json.dumps(surface())), "--help", "--help-all"}
    files = [p for p in (ROOT / "src").rglob("*.py") if p.name not in ("main.py", "flag.py")]
    named = [
        (path.relative_to(ROOT).as_posix(), flag)
        for path in files
        for line in path.read_text(encoding="utf-8").split("\n")
        if not OF_OTHERS.search(line)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)
    ]
    assert len(named) > 100
    assert [(path, flag) for path, flag in named if flag not in known] == []
