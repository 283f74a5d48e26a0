"""Adapters merged in the core space and in their factors: from files, into adapters and models, and as PEFT does it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.adapters.test_adapter_to_adapter import GPT2, deltas_of, merge
from tests.helpers.adapters import LLAMA, STACKS, save_adapter, save_groups, tiny
from tests.tolerances import F64_ORACLE
from torch import Tensor

import actmat
from actmat.api.matrices import merge_matrices
from actmat.errors import MergeError

FAMILIES: dict[str, list[dict[str, Any]]] = {
    "llama": [LLAMA, {**LLAMA, "target_modules": ["q_proj", "up_proj", "down_proj"]}],
    "gpt2": [GPT2, {**GPT2, "target_modules": ["c_attn", "c_proj"]}],
    "mixtral": [STACKS, STACKS],
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of each family have one rank and scaling."""
    return save_groups(tmp_path_factory.mktemp("spaces"), FAMILIES)


def both(group: Path) -> list[Path]:
    return [group / "a1", group / "a2"]


def in_a_model(group: Path, out: Path, **fields: Any) -> dict[str, Tensor]:
    """Deltas that the same recipe gives in a full model, by transformers' names in memory."""
    actmat.merge(group / "base", both(group), out=out, compute_dtype="float64", durable=False, **fields)
    kind = type(tiny(group.name))
    merged, base = (kind.from_pretrained(p, dtype=torch.float64).state_dict() for p in (out, group / "base"))
    return {n: merged[n] - base[n] for n in base}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-8) -> None:
    top = max(float(e.norm()) for e in expected.values())
    for name, delta in expected.items():
        assert float((found[name] - delta).norm()) <= tolerance * top, name
    assert top > 0


GIVEN: list[dict[str, Any]] = [
    {"space": "core", "method": "ties", "options": {"density": 0.4}},
    {"space": "core", "method": "dare", "options": {"density": 0.5}, "seed": 3, "post": "isotropize"},
    {"space": "core", "method": "tsv", "post": ["isotropize", "mean_norm"]},
    {"space": "factors", "method": "ties", "options": {"density": 0.4}, "post": "mean_norm"},
    {"space": "factors", "method": "dare", "options": {"density": 0.5}, "seed": 3},
    {"space": "pico", "method": "cart", "post": "isotropize"},
    {"space": "pico", "method": "dc_merge"},
    {"method": "task_arithmetic", "post": ["subspace_boosting", "mean_norm"]},
]


CASES = [("gpt2", given) for given in GIVEN]
# random masks are seeded by names, and a Mixtral is stored under others than it has in memory
CASES += [("mixtral", given) for given in GIVEN if given["method"] != "dare" and given["method"] != "tsv"]


@pytest.mark.parametrize(("family", "given"), CASES, ids=lambda x: x if isinstance(x, str) else x["method"])
def test_an_adapter_is_what_the_full_model_gets(
    family: str, given: dict[str, Any], groups: Path, tmp_path: Path
) -> None:
    group = groups / family
    merge(tmp_path, both(group), **given)
    assert_close(deltas_of(tmp_path / "out", family), in_a_model(group, tmp_path / "model", **given))


NAME = "model.layers.1.mlp.down_proj"


def pairs_of(group: Path) -> list[tuple[Tensor, Tensor]]:
    """Factors of one module that both adapters of the Llama have, in float64; alpha / r in B."""
    from safetensors.torch import load_file

    out = []
    for folder in both(group):
        stored = load_file(folder / "adapter_model.safetensors")
        a, b = (stored[f"base_model.model.{NAME}.lora_{x}.weight"].double() for x in "AB")
        out.append((4 * b, a))
    return out


@pytest.mark.parametrize("space", ["core", "factors"])
def test_files_and_tensors_give_the_same(space: Any, groups: Path, tmp_path: Path) -> None:
    group, options = groups / "llama", {"density": 0.3}
    manifest = merge(tmp_path, both(group), space=space, method="ties", options=options, post="isotropize:mean=rank")
    found = deltas_of(tmp_path / "out", "llama")[f"{NAME}.weight"]
    expected = merge_matrices("ties", pairs_of(group), space=space, post="isotropize:mean=rank", **options)
    assert float((found - expected).norm()) <= F64_ORACLE * float(expected.norm())
    row = next(m for m in manifest["modules"] if m["name"] == NAME)
    assert row["space"] == space
    assert row["stats"]["isotropic_rank"] > 0
    assert row["rank"] == (4 if space == "core" else 2)
    values = torch.linalg.svdvals(found)
    assert float((values[: row["rank"]] - values[0]).norm()) <= F64_ORACLE * float(values[0]), "all alike, by the step"
    assert float(values[row["rank"]]) <= F64_ORACLE * float(values[0])
    if space == "core":
        assert row["stats"]["core"] == "4x4"


@pytest.mark.parametrize("rule", ["ties", "linear"])
def test_factors_are_merged_as_peft_merges_them(rule: str, groups: Path, tmp_path: Path) -> None:
    group = groups / "llama"
    model = PeftModel.from_pretrained(tiny("llama"), group / "a1", adapter_name="a1")
    model.load_adapter(group / "a2", adapter_name="a2")
    density = {"density": 0.5} if rule == "ties" else {}
    weights = [1.0, 1.0] if rule == "ties" else [0.7, -0.3]
    model.add_weighted_adapter(["a1", "a2"], weights, "both", combination_type=rule, **density)
    model.set_adapter("both")
    base = tiny("llama").state_dict()
    expected = {n: v - base[n] for n, v in model.merge_and_unload(adapter_names=["both"]).state_dict().items()}
    options: dict[str, Any] = {"variant": "mergekit", "density": 0.5} if rule == "ties" else {"scaling": 1.0}
    given: list[Any] = [{"path": str(p), "weight": w} for p, w in zip(both(group), weights, strict=True)]
    method = "ties" if rule == "ties" else "task_arithmetic"
    merge(tmp_path, given, space="factors", method=method, options=options)
    assert_close(deltas_of(tmp_path / "out", "llama"), expected, 1e-6)  # PEFT's factors are float32


def test_the_plan_says_what_a_space_does(groups: Path) -> None:
    group = groups / "llama"

    def reasons(**fields: Any) -> str:
        plan = actmat.plan(None, both(group), **fields)
        assert all(i.is_factored for i in plan.items)
        return " | ".join({i.reason for i in plan.items})

    assert "average in the core space (equal to the full space)" in reasons(method="average", space="core")
    assert "tsv in the core space (equal to the full space except for counts" in reasons(method="tsv", space="core")
    assert "ties in the core space (not the result of the full space" in reasons(method="ties", space="core")
    assert "ties of A and of B apart" in reasons(method="ties", space="factors")
    assert ", then isotropize" in reasons(method="average", post="isotropize")
    ranks = {s: {i.write.exact_rank for i in actmat.plan(None, both(group), method="ties", space=s).items} for s in
             ("core", "factors")}  # fmt: skip
    assert ranks == {"core": {4, 2}, "factors": {2}}


def test_what_no_space_holds_is_refused_or_told(groups: Path, tmp_path: Path) -> None:
    group = groups / "llama"
    save_adapter(tmp_path / "other", "llama", 3, r=3, lora_alpha=8, target_modules=["q_proj"])
    with pytest.raises(MergeError, match=r"has ranks 2 .*, 3 .*; take 'space: core'") as error:
        actmat.plan(None, [group / "a1", tmp_path / "other"], method="ties", space="factors")
    assert "scalings alpha / r 4 (a1), 2.66667 (other)" in str(error.value)
    assert actmat.plan(None, [group / "a1", tmp_path / "other"], method="ties", space="core").output == "adapter"
    with pytest.raises(MergeError, match="trim=tensor"):
        actmat.plan(None, both(group), method="ties", options={"trim": "global"}, space="core")
    save_adapter(tmp_path / "full", "llama", 4, **{**LLAMA, "modules_to_save": ["up_proj"]})
    plan = actmat.plan(group / "base", [group / "a1", tmp_path / "full"], method="ties", space="core")
    told = [i.reason for i in plan.items if "in the full space: trained in full in full" in i.reason]
    assert len(told) == 2, "one for each layer"
