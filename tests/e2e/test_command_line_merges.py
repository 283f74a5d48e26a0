"""Real merges through `actmat merge` and `actmat plan`: flags, recipe files, several outputs of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.helpers.models import BY_NAME, save_family, stored
from tests.helpers.shell import actmat_command

import actmat

LLAMA = BY_NAME["llama"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_family(LLAMA, folder, n_experts=2)
    return folder


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


def test_several_methods_and_values_give_an_output_each(family: Path, tmp_path: Path) -> None:
    flags = ["-m", "average", "-m", "actmat", "-o", "rtol=1e-6,1e-2"]
    actmat_command("merge", *inputs(family), *flags, "--out", tmp_path / "all", "--quiet")
    outs = sorted(p.name for p in (tmp_path / "all").iterdir())
    assert outs == ["actmat,rtol=0.01", "actmat,rtol=1e-06", "average"]
    actmat_command("merge", *inputs(family), "-m", "actmat", "-o", "rtol=1e-2", "--out", tmp_path / "one", "--quiet")
    assert same(tmp_path / "all" / "actmat,rtol=0.01", tmp_path / "one")
    assert not same(tmp_path / "all" / "actmat,rtol=0.01", tmp_path / "all" / "average")


def test_plan_reads_and_writes_nothing(family: Path, tmp_path: Path) -> None:
    before = sorted(family.rglob("*"))
    plan = json.loads(actmat_command("plan", *inputs(family), "--json", "--full"))
    assert sorted(family.rglob("*")) == before
    report = actmat.merge(
        family / "base", [family / "expert1", family / "expert2"], out=tmp_path / "out", durable=False
    )
    rows = {r["name"]: r["reason"] for r in report.manifest["tensors"]}
    assert {t["name"]: t["reason"] for t in plan["items"]} == rows
    assert plan["totals"]["write_bytes"] == sum(f.stat().st_size for f in report.out.glob("*.safetensors"))
    assert plan["totals"]["read_bytes"] == sum(
        t.nbytes for place in ("base", "expert1", "expert2") for t in stored(family / place).values()
    )


def test_all_problems_at_once_and_nothing_written(family: Path, tmp_path: Path) -> None:
    flags = ["-m", "ties", "-o", "densitty=0.3", "--keep", "no.such.*"]
    said = actmat_command("merge", *inputs(family), *flags, "--out", tmp_path / "out", code=1)
    assert "densitty" in said
    assert "density" in said
    assert "no.such.*" in said
    assert not list(tmp_path.iterdir())
