"""Post-processing of whole merges: on every form, in the plan, in the record, the same bytes whoever merges."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.helpers.merging import EMBEDDING, NORM, Family, actmat
from tests.tolerances import F64_ORACLE
from torch import Tensor

from actmat.api import merging as api
from actmat.api.matrices import merge_matrices
from actmat.errors import MergeError
from actmat.methods.post import Step

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
    post = ["subspace_boosting:beta=0.6", {"name": "isotropize", "options": {"mean": "rank"}}]
    found, rows = merge(family, tmp_path / "out", method=method, post=post, scale=0.5)
    for name in LINEAR:
        expected = 0.5 * merge_matrices(method, deltas_of(family, name), post=post)
        assert float((found[name] - expected).norm()) <= F64_ORACLE * float(expected.norm()), name
        stats = rows[name]["stats"]
        assert stats["boosted"] > 0
        assert stats["isotropic_rank"] > 0
        assert rows[name]["post"] == [
            {"name": "subspace_boosting", "options": {"beta": 0.6}},
            {"name": "isotropize", "options": {"mean": "rank"}},
        ]
        assert f"{method}, then subspace_boosting, isotropize" in rows[name]["reason"]
    for name in (EMBEDDING, NORM):
        factor = 0.5 * 0.4 if method == "task_arithmetic" else 0.5  # its sum, with scale; the mean of the others
        expected = factor * sum(deltas_of(family, name))
        assert float((found[name] - expected).norm()) <= 1e-12 * float(found[name].norm() + 1)
        assert "post" not in rows[name]


def test_tables_and_vectors_keep_what_the_method_gives(family: Family, tmp_path: Path) -> None:
    found, rows = merge(
        family, tmp_path / "out", method="task_arithmetic", scope="all", post="isotropize", options={"scaling": 1}
    )
    for name in (EMBEDDING, NORM):
        expected = sum(deltas_of(family, name))
        assert float((found[name] - expected).norm()) <= 1e-12 * float(found[name].norm() + 1)
        assert rows[name]["action"] == "merge"
        assert "post" not in rows[name]


def test_flags_and_plan(family: Family) -> None:
    flags = "--set post=subspace_boosting:beta=0.1,mean_norm --method average --json --full"
    shown = actmat(family.argv(*flags.split(), command="plan"), code=0)
    post = ["subspace_boosting:beta=0.1", "mean_norm"]
    plan = api.plan(family.base, family.experts, method="average", post=post)
    assert json.loads(shown.out)["items"] == plan.to_json()["items"]
    (call,) = {str(i.call.post): i.call for i in plan.items if i.call is not None and i.action == "merge"}.values()
    assert call.post == (Step("subspace_boosting", {"beta": 0.1}), Step("mean_norm", {}))
    plain = api.plan(family.base, family.experts, method="average")
    assert plan.seconds > plain.seconds
    assert plan.peak_bytes(1) > plain.peak_bytes(1)
    assert {i.name for i in plan.items if "then subspace_boosting, mean_norm" in i.reason} == {
        *LINEAR,
        "lm_head.weight",
    }


def test_all_problems_are_told_at_once(family: Family, tmp_path: Path) -> None:
    with pytest.raises(MergeError) as error:
        api.plan(family.base, family.experts, post=["isotropise", "isotropize:beta=1"], space="core")
    for words in (
        "post: Unknown post-processing step 'isotropise'. Did you mean 'isotropize'?",
        "post: post-processing 'isotropize' has no option 'beta'",
        "'space: core' merges factors of adapters, but expert0, expert1 have none",
    ):
        assert words in str(error.value), words
    with pytest.raises(MergeError, match="expected NAME or NAME:OPTION=VALUE"):
        api.plan(family.base, family.experts, post="isotropize:mean")
    wrong = actmat(family.argv("--set", "space=kernel", command="plan"))
    assert wrong.code != 0
    assert "space" in wrong.err
