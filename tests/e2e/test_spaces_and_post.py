"""Post-processing of whole merges: on every form, in the plan, in the record, the same bytes whoever merges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import EMBEDDING, NORM, Family, actmat
from tests.tolerances import F64_ORACLE
from torch import Tensor

from actmat import api
from actmat.errors import MergeError
from actmat.extras.research.matrices import merge_matrices
from actmat.planning import MergePlan
from actmat.planning.item import PostCall
from actmat.planning.post import layers_of

LINEAR = tuple(
    f"model.layers.{i}.{m}.weight" for i in range(3) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(tmp_path_factory.mktemp("post"), layers=3)


def merge(family: Family, out: Path, **settings: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Merged deltas in float64, and rows of the manifest by tensor."""
    chosen: dict[str, Any] = {"out": out, "threads": 1, "durable": False, "compute_dtype": "float64"}
    chosen |= {"dtype": "float64"} | settings
    report = api.merge(family.base, family.experts, **chosen)
    base = load_file(family.base / "model.safetensors")
    found = load_file(out / "model.safetensors")
    return {n: found[n] - base[n].double() for n in found}, {t["name"]: t for t in report.manifest["tensors"]}


def deltas_of(family: Family, name: str) -> list[Tensor]:
    base = load_file(family.base / "model.safetensors")[name].double()
    return [load_file(e / "model.safetensors")[name].double() - base for e in family.experts]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "actmat"])
def test_steps_change_every_merged_matrix_and_nothing_else(method: str, family: Family, tmp_path: Path) -> None:
    post = ["subspace_boosting:beta=0.6", {"name": "svc", "options": {"alpha": 0.5}}]
    found, rows = merge(family, tmp_path / "out", method=method, post=post, scale=0.5)
    for name in LINEAR:
        expected = 0.5 * merge_matrices(method, deltas_of(family, name), post=post)
        assert float((found[name] - expected).norm()) <= F64_ORACLE * float(expected.norm()), name
        stats = rows[name]["stats"]
        assert stats["boosted"] > 0
        assert stats["svc_gain_max"] >= stats["svc_gain_min"] > 0
        assert rows[name]["post"] == [
            {"name": "subspace_boosting", "options": {"beta": 0.6}},
            {"name": "svc", "options": {"alpha": 0.5, "floor": 0.0}},
        ]
        assert f"{method}, then subspace_boosting, svc" in rows[name]["reason"]
    for name in (EMBEDDING, NORM):
        expected = sum(deltas_of(family, name)) / 2
        assert float((found[name] - expected).norm()) <= 1e-12 * float(found[name].norm() + 1)
        assert "post" not in rows[name]


def test_tables_and_vectors_keep_what_the_method_gives(family: Family, tmp_path: Path) -> None:
    found, rows = merge(
        family, tmp_path / "out", method="task_arithmetic", scope="all", post="svc", options={"scaling": 1}
    )
    for name in (EMBEDDING, NORM):
        expected = sum(deltas_of(family, name))
        assert float((found[name] - expected).norm()) <= 1e-12 * float(found[name].norm() + 1)
        assert rows[name]["action"] == "merge"
        assert "post" not in rows[name]


def test_esm_scales_layers_by_their_merged_norms(family: Family, tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": "actmat", "postprocess": {"norm_cap": 0.9}}
    plain, _ = merge(family, tmp_path / "plain", **given)
    found, rows = merge(family, tmp_path / "out", **given, post="esm")
    for kind in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        names = [f"model.layers.{i}.{kind}.weight" for i in range(3)]
        norms = [float(plain[n].norm()) for n in names]
        for name, norm in zip(names, norms, strict=True):
            factor = (norm / (sum(norms) / 3)) ** 2
            assert rows[name]["stats"]["layer_factor"] == pytest.approx(factor, rel=F64_ORACLE)
            assert float((found[name] - factor * plain[name]).norm()) <= F64_ORACLE * float(plain[name].norm())
            assert factor != pytest.approx(1, rel=F64_ORACLE), "the test would be void"


def test_larv_scales_layers_by_spectra_conflict_and_depth(family: Family, tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}}
    found, rows = merge(family, tmp_path / "out", **given, post=["svc", "larv:gamma=2"])
    base = load_file(family.base / "model.safetensors")
    scores, contrasts = {}, {}

    def rank(matrix: Tensor) -> float:
        s = torch.linalg.svdvals(matrix) ** 2
        return math.exp(float(torch.special.entr(s / s.sum()).sum()))

    merged = {n: merge_matrices("task_arithmetic", deltas_of(family, n), scaling=1.0, post="svc") for n in found if
              n in LINEAR or n == "lm_head.weight"}  # fmt: skip
    for name in LINEAR:
        w, d = base[name].double(), merged[name]
        contrasts[name] = rank(w) / rank(d)
        left, right = w @ d.mT - d @ w.mT, w.mT @ d - d.mT @ w
        scores[name] = float(left.norm() + right.norm()) / (2 * float(w.norm() * d.norm()))
    conflicts = torch.tensor(list(scores.values()), dtype=torch.float64)
    z = (conflicts - conflicts.mean()) / conflicts.std(correction=0)
    for name, own in zip(LINEAR, z, strict=True):
        depth = (int(name.split(".")[2]) + 1) / 3
        score = contrasts[name] * depth**0.5 / (1 + float(torch.nn.functional.softplus(own)))
        factor = 1 + math.tanh(2 * (score - 1)) / 2
        assert rows[name]["stats"]["layer_factor"] == pytest.approx(factor, rel=F64_ORACLE)
        assert float((found[name] - factor * merged[name]).norm()) <= F64_ORACLE * float(merged[name].norm())
    head = merged["lm_head.weight"]
    assert rows["lm_head.weight"]["stats"]["layer_factor"] == 1
    assert float((found["lm_head.weight"] - head).norm()) <= F64_ORACLE * float(head.norm()) * 10


RECIPES: list[dict[str, Any]] = [
    {"method": "actmat", "post": ["isotropise", "esm"]},
    {"method": "ties", "options": {"trim": "global"}, "post": ["svc", "larv"]},
    {"method": "average", "post": "subspace_boosting"},
]


@pytest.mark.parametrize("given", RECIPES, ids=lambda g: g["method"])
def test_the_bytes_are_those_of_one_worker(given: dict[str, Any], family: Family, tmp_path: Path) -> None:
    common: dict[str, Any] = {"durable": False, **given}
    api.merge(family.base, family.experts, out=tmp_path / "one", threads=1, **common)
    api.merge(family.base, family.experts, out=tmp_path / "three", threads=3, **common)
    api.merge(family.base, family.experts, out=tmp_path / "devices", threads=2, device="cpu:0,1", **common)
    one, three, devices = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "three", "devices"))
    for name, value in one.items():
        assert torch.equal(three[name], value), name
        assert torch.equal(devices[name], value), name


def test_flags_and_plan(family: Family) -> None:
    shown = actmat(
        family.argv(
            "--post", "svc:alpha=0.1", "--post", "esm", "--method", "average", "--json", "--full", command="plan"
        )
    )
    assert shown.code == 0, shown.err
    plan = MergePlan.from_json(json.loads(shown.out))
    (call,) = {str(i.call.post): i.call for i in plan.items if i.call is not None and i.action == "merge"}.values()
    assert call.post == (PostCall("svc", {"alpha": 0.1, "floor": 0.0}), PostCall("esm", {"power": 2.0}))
    assert MergePlan.from_json(plan.to_json()) == plan
    assert any("'esm' measures the merged model" in note and "10 items" in note for note in plan.notes)
    plain = api.plan(family.base, family.experts, method="average")
    assert not any("merged twice" in note for note in plain.notes)
    assert plan.flops > 2 * plain.flops
    assert plan.peak_bytes(1) > plain.peak_bytes(1)
    assert {i.name for i in plan.items if "then svc, esm" in i.reason} == {*LINEAR, "lm_head.weight"}


def test_all_problems_are_told_at_once(family: Family, tmp_path: Path) -> None:
    bad = {
        "post": ["scv", "svc:beta=1", "esm", "larv", "isotropise"],
        "space": "core",
        "pool": ["*.mlp.up_proj.weight"],
    }
    with pytest.raises(MergeError) as error:
        api.plan(family.base, family.experts, **bad)
    for words in (
        "post: There is no post-processing 'scv'. Did you mean 'svc'?",
        "post: post-processing 'svc' has no option 'beta'",
        "post: esm and larv both scale layers",
        "post: 'esm' measures layers one by one",
        "'space: core' works on the factors of one module; drop 'pool'",
        "'space: core' merges factors of adapters, and expert0, expert1 have none",
    ):
        assert words in str(error.value), words
    with pytest.raises(MergeError, match="'esm' scales what all other steps leave, and is not the last"):
        api.plan(family.base, family.experts, post=["esm", "svc"])
    with pytest.raises(MergeError, match="expected NAME or NAME:OPTION=VALUE"):
        api.plan(family.base, family.experts, post="svc:alpha")
    wrong = actmat(family.argv("--space", "kernel", command="plan"))
    assert wrong.code != 0
    assert "space" in wrong.err


def test_positions_of_layers() -> None:
    keys = [
        ("enc.0.q.weight", ""),
        ("enc.3.q.weight", ""),
        ("dec.0.q.weight", "v"),
        ("head", ""),
        ("h.1.moe", "2/gate"),
    ]
    found = layers_of(keys)
    assert [(found[k].kind, found[k].number, found[k].count) for k in keys] == [
        ("enc.*.q.weight", 1, 4),
        ("enc.*.q.weight", 4, 4),
        ("dec.*.q.weight/v", 1, 1),
        ("head", None, 0),
        ("h.*.moe/*/gate", 2, 2),
    ]
