"""Merges by the command line; `actmat verify` finds every change, and only changes; the card says what hubs read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.helpers.hub import HubStandIn
from tests.helpers.merging import actmat_command, card, flip
from tests.helpers.models import BY_NAME, save_family, stored

import actmat
from actmat.errors import MergeError
from actmat.run.automatic import TABLE

# `actmat verify` finds every change, and only changes; the model card says what hubs read.


LLAMA = BY_NAME["llama"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_family(LLAMA, folder, n_experts=2)
    (folder / "expert1" / "tokenizer.json").write_text('{"of": "expert1"}')
    return folder


@pytest.fixture
def project(family: Path, tmp_path: Path) -> Path:
    """A folder with the inputs and a finished merge beside them."""
    folder = tmp_path / "project"
    shutil.copytree(family, folder)
    actmat.merge(folder / "base", [folder / "expert1", folder / "expert2"], out=folder / "out", durable=False)
    return folder


@pytest.mark.parametrize("name", ["base", "expert2"])
def test_a_flipped_bit_of_an_input(name: str, project: Path) -> None:
    flip(project / name / "model.safetensors")
    (problem,) = actmat.verify(project / "out").problems
    assert f"'{name}'" in problem
    assert actmat.verify(project / "out", inputs=False).ok


def test_missing_and_extra_tensors(project: Path) -> None:
    file = project / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["stranger.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    problems = actmat.verify(project / "out", inputs=False).problems
    assert [p for p in problems if "lacks tensor 'model.norm.weight'" in p]
    assert [p for p in problems if "extra tensor 'stranger.weight'" in p]


def test_a_moved_project_finds_its_inputs(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "project"
    moved.parent.mkdir()
    project.rename(moved)
    result = actmat.verify(moved / "out")
    assert result.ok
    assert result.inputs == ("base", "expert1", "expert2")
    shutil.rmtree(moved / "expert1")
    result = actmat.verify(moved / "out")
    assert result.inputs == ("base", "expert2")
    assert [p for p in result.problems if "input 'expert1' cannot be checked" in p]


def test_the_card_of_a_local_merge(project: Path) -> None:
    head, body = card(project / "out")
    assert head["tags"] == ["merge", "actmat"]
    manifest = json.loads((project / "out" / "actmat_manifest.json").read_text())
    rows, method = manifest["tensors"], TABLE["full", "decoder"].method
    counts = {a: sum(r["action"] == a for r in rows) for a in ("merge", "average")}
    assert f"{counts['merge']} merged with `{method}`, {counts['average']} averaged" in body
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert [e["path"] for e in recipe["experts"]] == [str(project / "expert1"), str(project / "expert2")]


def test_a_merge_of_hub_ids(hub: HubStandIn, family: Path, tmp_path: Path) -> None:
    for name in ("base", "expert1", "expert2"):
        hub.add(f"org/{name}", family / name)
    plan = actmat.plan("org/base", ["org/expert1", "org/expert2"])
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "a plan downloads no weights"
    assert plan.recipe.labels == ("expert1", "expert2")
    report = actmat.merge(
        "org/base", ["org/expert1", "org/expert2@main"], out=tmp_path / "out", durable=False, files_from="expert1"
    )
    local = actmat.merge(
        family / "base", [family / "expert1", family / "expert2"], out=tmp_path / "local", durable=False
    )
    assert report.manifest["output"]["content"] == local.manifest["output"]["content"]
    copied = report.out / "tokenizer.json"
    assert copied.exists()
    assert not copied.is_symlink(), "as in the cache of the hub"
    model = LLAMA.loader.from_pretrained(report.out, dtype=torch.float32)
    assert torch.isfinite(LLAMA.output(model)).all()
    result = actmat.verify(report.out)
    assert result.ok
    assert result.inputs == ("base", "expert1", "expert2")


def test_an_expert_in_a_folder_called_base_has_a_name_of_its_own(project: Path, tmp_path: Path) -> None:
    (project / "other").mkdir()
    shutil.copytree(project / "expert1", project / "other" / "base")
    experts = [project / "other" / "base", project / "expert2"]
    actmat.merge(project / "base", experts, out=project / "again", durable=False)
    result = actmat.verify(project / "again")
    assert result.ok, result.problems
    assert result.inputs == ("base", "base-expert", "expert2")
    flip(project / "other" / "base" / "model.safetensors")
    (problem, *_) = actmat.verify(project / "again").problems
    assert "base-expert" in problem
    for name in ("base", "union"):
        with pytest.raises(MergeError, match=f"'{name}' stands for the"):
            actmat.merge(project / "base", [{"path": str(project / "expert1"), "name": name}], out=tmp_path / "no")


# Real merges through `actmat merge` and `actmat plan`: flags, recipe files, several outputs of one run.


def inputs(family: Path) -> list[str]:
    return ["--base", str(family / "base"), "-e", f"first={family / 'expert1'}", "-e", f"second={family / 'expert2'}"]


def same(a: Path, b: Path) -> bool:
    one, other = stored(a), stored(b)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_flags_are_the_function(family: Path, tmp_path: Path) -> None:
    flags = ["-m", "actmat", "-o", "rtol=1e-3", "--scale", "0.5", "--keep", "*.norm.weight", "--dtype", "bfloat16"]
    said = actmat_command(
        "merge", *inputs(family), *flags, "--out", tmp_path / "cli", "--threads", 1, "--set", "durable=false"
    )
    assert "merged" in said
    report = actmat.merge(
        family / "base",
        [family / "expert1", family / "expert2"],
        method="actmat",
        options={"rtol": 1e-3},
        scale=0.5,
        keep=["*.norm.weight"],
        dtype="bfloat16",
        out=tmp_path / "python",
        durable=False,
    )
    assert same(tmp_path / "cli", report.out)
    rows = json.loads((tmp_path / "cli" / "actmat_manifest.json").read_text())["experts"]
    assert [r["name"] for r in rows] == ["first", "second"]


def test_a_recipe_file_and_the_card_give_the_same_merge(family: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "base": str(family / "base"),
        "experts": [str(family / "expert1"), {"path": str(family / "expert2"), "weight": 2.0}],
        "method": "average",
        "rules": [{"match": "*.mlp.*", "scale": 0.5}],
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    actmat_command("merge", file, "--out", tmp_path / "first", "--quiet")
    again = (tmp_path / "first" / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "again.yaml").write_text(again)
    actmat_command("merge", tmp_path / "again.yaml", "--out", tmp_path / "second", "--quiet")
    assert same(tmp_path / "first", tmp_path / "second")
