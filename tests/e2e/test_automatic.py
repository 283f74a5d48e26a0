"""`method: auto` takes a named method by what the experts are, and says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest
import torch
from safetensors.torch import load_file, save_file

import actmat
from actmat.errors import CheckpointError, RecipeError
from actmat.extras.collect.outputs import recipe_of_output
from actmat.extras.models.loading import load_model
from actmat.recipe import Recipe
from actmat.run import adapters as adapters_module
from actmat.run import automatic
from actmat.run.adapters import ALL_BELOW, size_and_overlap
from actmat.run.automatic import (
    APART,
    DIFFERENT_MODULES,
    GENTLE,
    ON_ADAPTERS,
    SHARED_START,
    TABLE,
    AutoChoice,
    choice_for,
)
from actmat.run.locate import locate_inputs


def pair(models: Path, kind: str) -> list[Path]:
    return [models / kind / name for name in ("math", "code")]


def recipe_of(plan: actmat.MergePlan) -> tuple[str, str]:
    return plan.recipe.method, plan.recipe.notes[-1]


def test_checkpoints_of_a_decoder(models: Path) -> None:
    method, note = recipe_of(actmat.plan(models / "base", pair(models, "experts")))
    assert method == TABLE["full", "decoder"].method
    assert note.startswith(f"auto: {method}, for checkpoints of a decoder (+")


@pytest.mark.parametrize("with_base", [True, False])
def test_adapters_of_a_decoder(models: Path, with_base: bool) -> None:
    plan = actmat.plan(models / "base" if with_base else None, pair(models, "adapters"))
    choice = choice_for("other" if with_base else "unknown", "any")
    assert (plan.recipe.method, plan.recipe.space) == (choice.method, "full")
    assert ("change the weights by 21 %" if with_base else "of a decoder of unknown size") in plan.recipe.notes[-1]


def gentle_pair(models: Path, folder: Path) -> list[Path]:
    for name in ("math", "code"):
        shutil.copytree(models / "adapters" / name, folder / name)
        path = folder / name / "adapter_model.safetensors"
        save_file({n: t * (1e-3 if "lora_B" in n else 1) for n, t in load_file(path).items()}, path)
    return [folder / "math", folder / "code"]


def test_adapters_of_different_modules_are_averaged_unless_gentle(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = gentle_pair(models, tmp_path)
    monkeypatch.setattr(automatic, "GENTLE", 0.0)
    assert actmat.plan(models / "base", adapters).recipe.method == TABLE["adapters", "any"].method
    path = adapters[1] / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "q_proj" not in n}, path)
    method, note = recipe_of(actmat.plan(models / "base", adapters))
    assert method == choice_for("other", "any").method
    assert f"; they change different modules ({DIFFERENT_MODULES})" in note
    monkeypatch.setattr(automatic, "GENTLE", 1.0)
    assert actmat.plan(models / "base", adapters).recipe.method == TABLE["gentle", "any"].method


def test_gentle_adapters_have_a_row_of_their_own(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = gentle_pair(models, tmp_path)
    recipe = {"base": str(models / "base"), "experts": [{"path": str(a)} for a in adapters]}
    with locate_inputs(Recipe.model_validate(recipe)) as given:
        found = size_and_overlap(given)
    size, overlap = found
    assert 0 < size < GENTLE
    assert overlap < APART
    plan = actmat.plan(models / "base", adapters)
    assert plan.recipe.method == TABLE["gentle", "any"].method
    assert "that change the weights by 0.0" in plan.recipe.notes[-1]
    math, code = (load_file(a / "adapter_model.safetensors") for a in adapters)
    shared = {n: math[n] if "lora_A" in n else t for n, t in code.items()}
    save_file(shared, adapters[1] / "adapter_model.safetensors")
    plan = actmat.plan(models / "base", adapters)
    assert (plan.recipe.method, plan.recipe.space) == (TABLE["gentle", "any"].method, "full")
    monkeypatch.setattr(automatic, "GENTLE", 0.0)
    assert actmat.plan(models / "base", adapters).recipe.method == choice_for("other", "any").method


@pytest.mark.parametrize("all_below", [0, ALL_BELOW])
def test_size_and_overlap_are_those_of_the_formula(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_below: int
) -> None:
    """Mean over modules and adapters, one of them five times as large; median over both pairs of three adapters."""
    monkeypatch.setattr(adapters_module, "ALL_BELOW", all_below)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, name in zip(folders, ("math", "math", "code"), strict=True):
        shutil.copytree(models / "adapters" / name, folder)
    tensors = load_file(folders[1] / "adapter_model.safetensors")
    larger = {n: t * (5 if "lora_B" in n and ".0." in n else 1) for n, t in tensors.items()}
    save_file(larger, folders[1] / "adapter_model.safetensors")
    weights, sizes, cosines = load_model(models / "base").model.state_dict(), [], []
    found = [load_file(f / "adapter_model.safetensors") for f in folders]
    for name in (n.removesuffix(".lora_A.weight") for n in found[0] if n.endswith(".lora_A.weight")):
        base = weights[name.removeprefix("base_model.model.") + ".weight"]
        for folder, own in zip(folders, found, strict=True):
            config = json.loads((folder / "adapter_config.json").read_text())
            delta = own[f"{name}.lora_B.weight"] @ own[f"{name}.lora_A.weight"] * config["lora_alpha"] / config["r"]
            sizes.append(float(delta.norm() / base.norm()))
        rows = [torch.linalg.qr(own[f"{name}.lora_A.weight"].mT).Q for own in found]
        cosines += [c for a, b in pairwise(rows) for c in torch.linalg.svdvals(a.mT @ b).tolist()]
    with locate_inputs(
        Recipe.model_validate({"base": str(models / "base"), "experts": [{"path": str(f)} for f in folders]})
    ) as given:
        assert size_and_overlap(given) == pytest.approx((fmean(sizes), median(cosines)), rel=1e-4)
    assert abs(fmean(sizes) - median(sizes)) > 0.01 * fmean(sizes), "else a median would do"


def test_a_choice_between_the_borders_says_what_it_gave(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = AutoChoice("tsv", sets=3, gain=2.0, worst=1.0)
    monkeypatch.setattr(automatic, "TABLE", {**TABLE, ("adapters", "any"): chosen})
    monkeypatch.setattr(automatic, "HOT", 0.3)
    plan = actmat.plan(models / "base", pair(models, "adapters"))
    assert plan.recipe.method == "tsv"
    assert "(+2.0 points over the average on 3 bases, +1.0 on the worst); try: --data self" in plan.recipe.notes[-1]
    monkeypatch.setattr(automatic, "TABLE", {**TABLE, ("adapters", "any"): replace(chosen, sets=1)})
    note = actmat.plan(models / "base", pair(models, "adapters")).recipe.notes[-1]
    assert "(+2.0 points over the average on the one base that tests it); try: --data self" in note
    given = actmat.plan(models / "base", pair(models, "adapters"), space="core").recipe
    assert (given.method, given.space) == (choice_for("changes", "decoder").method, "core")
    weighted = actmat.plan(models / "base", pair(models, "adapters"), weights=[1.0, 0.3]).recipe
    assert (weighted.method, weighted.space) == ("task_arithmetic", "full")


def test_adapters_without_factors_are_merged_as_they_are(models: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fields = {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(fields))
        scales = {
            f"base_model.model.model.layers.{i}.self_attn.k_proj.ia3_l": torch.full((16, 1), 1.5) for i in range(2)
        }
        save_file(scales, tmp_path / name / "adapter_model.safetensors")
    plan = actmat.plan(models / "base", [tmp_path / "one", tmp_path / "two"])
    assert (plan.recipe.method, plan.recipe.space) == (choice_for("changes", "decoder").method, "full")


def test_both_forms_together(models: Path) -> None:
    experts = [models / "experts" / "math", models / "adapters" / "code"]
    assert recipe_of(actmat.plan(models / "base", experts))[0] == choice_for("mixed", "any").method


def test_one_expert_is_added_whole(models: Path, tmp_path: Path) -> None:
    report = actmat.merge(models / "base", [models / "experts" / "math"], out=tmp_path / "out", durable=False)
    assert (report.plan.recipe.method, report.plan.recipe.options) == ("task_arithmetic", {"scaling": 1.0})
    wanted, found = (load_model(p).model.state_dict() for p in (models / "experts" / "math", tmp_path / "out"))
    assert all(found[n].equal(t) for n, t in wanted.items())


def test_weights_of_adapters_are_obeyed(models: Path) -> None:
    for weights in ([1.0, 0.3], [1.0, 1.0], [0.5, -0.5]):
        recipe = actmat.plan(models / "base", pair(models, "adapters"), weights=weights).recipe
        assert (recipe.method, recipe.options) == ("task_arithmetic", {"scaling": 1.0}), "as every stack of LoRA"
    mixed = [models / "experts" / "math", models / "adapters" / "code"]
    assert recipe_of(actmat.plan(models / "base", mixed, weights=[1.0, 0.3]))[0] == "linear"


def test_options_want_a_method(models: Path) -> None:
    with pytest.raises(RecipeError, match="none is named") as error:
        actmat.plan(models / "base", pair(models, "experts"), options={"density": 0.3})
    assert "found density. Fix" in str(error.value)


def test_the_record_names_the_method_and_the_reason(models: Path, tmp_path: Path) -> None:
    actmat.merge(models / "base", pair(models, "experts"), out=tmp_path / "out", durable=False)
    recipe = recipe_of_output(tmp_path / "out")
    assert recipe.method == TABLE["full", "decoder"].method
    assert recipe.notes[-1].startswith("auto: ")
    again = actmat.merge(models / "base", pair(models, "experts"), out=tmp_path / "out", durable=False)
    assert again.was_finished


def test_the_papers_method_on_adapters_comes_with_its_record(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "HOTTEST", 0.2)
    plan = actmat.plan(models / "base", pair(models, "adapters"), method="actmat")
    assert plan.recipe.method == "actmat"
    note = plan.recipe.notes[-1]
    assert note.startswith("actmat on adapters that change the weights by ")
    assert f"%, more than any measured ones: {ON_ADAPTERS['other']}; auto would choose average: +0.0" in note
    assert "share the start" not in note
    (note,) = actmat.plan(None, pair(models, "adapters"), method="actmat").recipe.notes
    assert f"of unknown size: {ON_ADAPTERS['unknown']}; auto would choose average: " in note
    assert not actmat.plan(models / "base", pair(models, "experts"), method="actmat").recipe.notes


@pytest.mark.parametrize("with_base", [True, False])
def test_adapters_that_share_the_start_of_a_come_with_what_was_measured(
    models: Path, tmp_path: Path, with_base: bool
) -> None:
    files = []
    for name in ("math", "code"):
        shutil.copytree(models / "adapters" / name, tmp_path / name)
        files.append(tmp_path / name / "adapter_model.safetensors")
    start, tensors = map(load_file, files)
    base, adapters = models / "base" if with_base else None, [tmp_path / "math", tmp_path / "code"]
    for share, words in ((0.999, f"the start of A (overlap 1.00; {SHARED_START})"), (0.5, "a part of A (overlap 0.")):
        mixed = {n: start[n] * share + t * (1 - share) if "lora_A" in n else t for n, t in tensors.items()}
        save_file(mixed, files[1])
        for method in ("auto", "actmat", "actmat_ridge", "wudi", "ct_merging", "tsv"):
            notes = actmat.plan(base, adapters, method=method).recipe.notes
            assert [f"; they share {words}" in note for note in notes] == [True], (method, notes)
        assert not actmat.plan(base, adapters, method="ties").recipe.notes
    (note,) = actmat.plan(base, adapters, method="actmat").recipe.notes
    assert str(ON_ADAPTERS["other"]) in note, "of adapters that share a part of A, with a base or without"
    assert words in actmat.diagnose(base, adapters, method="actmat_ridge").recipe["notes"][-1]


def test_a_problem_of_the_expert_that_deltas_are_measured_from_is_told_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        torch.save([1, 2], tmp_path / name / "pairs.pt")
    with pytest.raises(CheckpointError, match=r"2 problems with the inputs") as refused:
        actmat.plan(None, [tmp_path / "a", tmp_path / "b"])
    assert len(set(refused.value.problems)) == len(refused.value.problems) == 2
