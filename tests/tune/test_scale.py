"""Only the scale of the method that was asked for: `actmat merge --set tune_scale=true` and `actmat.tune_scale`."""

import json
from pathlib import Path

import pytest
from tests.helpers.family import data_flags, data_of, experts_of, model_flags
from tests.helpers.json_layouts import PINNED
from tests.helpers.merging import actmat as run

import actmat
from actmat.errors import RecipeError
from actmat.extras.tune.space import SCALES


def flags(family: Path, *more: str) -> list[str]:
    return ["merge", *model_flags(family), *data_flags(family), "--set", "tune_scale=true", *more]


def test_a_merge_gets_the_scale_that_the_inputs_choose(family: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    done = run(flags(family, "-m", "ties", "-o", "density=0.5", "--out", str(out)), code=0)
    assert max(map(len, done.out.splitlines())) <= 80
    assert "memory:" in done.err
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


def test_the_scale_of_a_recipe_file_is_replaced_and_its_rules_stay(family: Path, tmp_path: Path) -> None:
    experts = "".join(f"  - {place}\n" for place in experts_of(family))
    rule = "rules:\n  - {match: '*lm_head*', keep: base}\n  - {match: '*down_proj*', scale: 0.25}\n"
    (tmp_path / "r.yaml").write_text(f"base: {family / 'base'}\nexperts:\n{experts}method: average\n{rule}")
    run(["merge", tmp_path / "r.yaml", *flags(family)[7:], "--out", tmp_path / "merged"], code=0)
    manifest = json.loads((tmp_path / "merged" / "actmat_manifest.json").read_text())
    rows = {r["name"]: r for r in manifest["tensors"]}
    scale = manifest["recipe"]["scale"]
    assert manifest["recipe"]["rules"][1]["scale"] == 0.25
    assert rows["lm_head.weight"]["action"] == "copy"
    assert rows["model.layers.0.mlp.down_proj.weight"]["scale"] == 0.25
    assert rows["model.layers.0.mlp.up_proj.weight"]["scale"] == scale


def test_several_variants_get_a_scale_each(family: Path, tmp_path: Path) -> None:
    done = run(flags(family, "-m", "average", "-m", "tsv", "--out", str(tmp_path / "all"), "-q"), code=0)
    assert done.out == ""
    for name in ("average", "tsv"):
        told = json.loads((tmp_path / "all" / f"{name}.tune" / "tune.json").read_text())
        assert {t["method"] for t in told["trials"]} == {name}
        assert (tmp_path / "all" / name / "model.safetensors").is_file()


def test_the_function_searches_the_scales_that_are_given(family: Path, tmp_path: Path) -> None:
    report = actmat.tune_scale(family / "base", experts_of(family), data=data_of(family), out=tmp_path / "merged",
                               method="average", scales=[0.4, 0.8], new_tokens=2)  # fmt: skip
    tried = {t.candidate.scale for t in report.trials}
    assert {0.4, 0.8} < tried
    assert report.merged.plan.recipe.scale == report.chosen.candidate.scale
    with pytest.raises(RecipeError, match="no expert is named 'maths'"):
        actmat.tune_scale(family / "base", [family / "experts" / "math"], data={"maths": "x"}, out=tmp_path / "no")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--scale", "0.5"], "remove --scale"),
        (["--data", "more.jsonl"], "give --data once for all experts"),
    ],
)
def test_flags_that_contradict_it_are_refused(family: Path, tmp_path: Path, more: list[str], says: str) -> None:
    done = run(flags(family, *more, "--out", str(tmp_path / "merged")), code=2)
    assert says in done.words
    assert not list(tmp_path.iterdir())


def test_a_url_is_refused_before_a_model_is_loaded(family: Path) -> None:
    done = run(flags(family, "--out", "s3://bucket/merged"), code=1)
    assert "local folder" in done.err
