"""Only the scale of the method that was asked for: `actmat.tune_scale`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.family import data_of, experts_of
from tests.helpers.json_layouts import PINNED

import actmat
from actmat.api.reading import read_recipe
from actmat.errors import MergeError, RecipeError
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.space import SCALES


def scaled(family: Path, out: Path | str, **fields: Any) -> TuneReport:
    return actmat.tune_scale(family / "base", experts_of(family), data=data_of(family), out=out, **fields)


def test_a_merge_gets_the_scale_that_the_inputs_choose(family: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    scaled(family, out, method="ties", options={"density": 0.5})
    told = json.loads((tmp_path / "merged.tune" / "tune.json").read_text())
    assert set(told) == PINNED["tune"] - {"left_out"} | {"trials"}, "what tune --json prints, its trials left out"
    assert {(t["method"], t["options"]["density"]) for t in told["trials"]} == {("ties", 0.5)}
    scales = {t["scale"] for t in told["trials"]}
    assert {1.0, 0.7, 0.5} <= scales, "from 1 towards smaller losses"
    assert scales - set(SCALES), "then refined"
    best = min(told["trials"], key=lambda t: t["mean"])
    assert told["chosen"]["scale"] == best["scale"]
    assert [f["name"] for f in told["final"]][-1] == "base"
    assert not any("average" in f["name"] for f in told["final"]), "no other method is merged"
    manifest = json.loads((out / "actmat_manifest.json").read_text())
    assert manifest["recipe"]["scale"] == best["scale"]
    assert manifest["recipe"]["method"] == "ties"
    assert actmat.verify(out).ok
    recipe = read_recipe(tmp_path / "merged.tune" / "recipe.yaml", {"out": str(tmp_path / "again")})
    actmat.run.run_recipes([recipe])
    first, second = (load_file(p / "model.safetensors") for p in (out, tmp_path / "again"))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_the_rules_of_a_recipe_stay(family: Path, tmp_path: Path) -> None:
    rules = [{"match": "*lm_head*", "keep": "base"}, {"match": "*down_proj*", "scale": 0.25}]
    scaled(family, tmp_path / "merged", method="average", rules=rules)
    manifest = json.loads((tmp_path / "merged" / "actmat_manifest.json").read_text())
    rows = {r["name"]: r for r in manifest["tensors"]}
    scale = manifest["recipe"]["scale"]
    assert manifest["recipe"]["rules"][1]["scale"] == 0.25
    assert rows["lm_head.weight"]["action"] == "copy"
    assert rows["model.layers.0.mlp.down_proj.weight"]["scale"] == 0.25
    assert rows["model.layers.0.mlp.up_proj.weight"]["scale"] == scale


def test_the_function_searches_the_scales_that_are_given(family: Path, tmp_path: Path) -> None:
    report = scaled(family, tmp_path / "merged", method="average", scales=[0.4, 0.8], new_tokens=2)
    tried = {t.candidate.scale for t in report.trials}
    assert {0.4, 0.8} < tried
    assert report.merged.plan.recipe.scale == report.chosen.candidate.scale
    with pytest.raises(RecipeError, match="no expert is named 'maths'"):
        actmat.tune_scale(family / "base", [family / "experts" / "math"], data={"maths": "x"}, out=tmp_path / "no")


def test_a_url_is_refused_before_a_model_is_loaded(family: Path) -> None:
    with pytest.raises(MergeError, match="local folder"):
        scaled(family, "s3://bucket/merged")
