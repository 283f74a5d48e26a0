"""Every field of a recipe acts on a merged adapter as it acts on a full model, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapter_to_adapter import GPT2, deltas_of, merge
from tests.helpers.adapters import LLAMA, save_adapter, save_groups, tiny
from tests.helpers.checkpoint_files import edit_config
from tests.helpers.lapack import failing
from tests.helpers.located import open_adapter

import actmat
from actmat.errors import MergeError


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the tiny GPT-2 of different ranks and modules."""
    adapters = [
        {**GPT2, "target_modules": ["c_attn", "c_fc", "wpe"]},
        {**GPT2, "r": 3, "target_modules": ["c_attn", "c_proj", "wpe"]},
    ]
    return save_groups(tmp_path_factory.mktemp("groups"), {"gpt2": adapters}) / "gpt2"


def test_a_kept_module_has_no_delta_and_is_listed(group: Path, tmp_path: Path) -> None:
    rules = [{"match": "*.h.0.attn.c_attn.weight", "keep": "base"}]
    fields: dict[str, Any] = {"keep": ["*c_proj*"], "rules": rules, "method": "average"}
    plan = actmat.plan(None, [group / "a1", group / "a2"], **fields)
    assert plan.output == "adapter"
    assert sorted(plan.kept) == sorted(
        ["transformer.h.0.attn.c_attn.weight"]
        + [f"transformer.h.{i}.{m}.c_proj.weight" for i in (0, 1) for m in ("attn", "mlp")]
    )
    assert plan.to_json()["kept"]["transformer.h.0.mlp.c_proj.weight"] == "*c_proj*"
    manifest = merge(tmp_path, [group / "a1", group / "a2"], **fields)
    assert manifest["kept"] == dict(plan.kept)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert not any("c_proj" in n or "h.0.attn.c_attn" in n for n in written)
    one, two, found = (deltas_of(p, "gpt2") for p in (group / "a1", group / "a2", tmp_path / "out"))
    for name, delta in found.items():
        expected = torch.zeros_like(delta) if name in plan.kept else (one[name] + two[name]) / 2
        torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)


def test_a_full_tensor_can_be_kept(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", "vit", 1, r=2, target_modules=["q_proj"], modules_to_save=["classifier"])
    manifest = merge(tmp_path, [tmp_path / "a"], method="average", keep=["classifier.*"])
    assert set(manifest["kept"]) == {"classifier.weight", "classifier.bias"}
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] is None
    with pytest.raises(MergeError, match="leaves nothing to merge"):
        merge(tmp_path, [tmp_path / "a"], "none", method="average", keep=["*"])
    with pytest.raises(MergeError, match=r"'\*\.lm_head' matches no module"):
        merge(tmp_path, [tmp_path / "a"], "typo", method="average", keep=["*.lm_head"])


def test_what_an_adapter_cannot_honor_is_refused_at_once(group: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="A full model, as 'files_from' asks for, is merged into a base"):
        merge(tmp_path, [group / "a1", group / "a2"], files_from="a1")
    assert not (tmp_path / "out").exists()


def test_roles_reach_the_modules(group: Path) -> None:
    roles = [{"match": "*.c_fc.weight", "role": "vector"}]
    plan = actmat.plan(None, [group / "a1", group / "a2"], roles=roles)
    actions = {m.name.rpartition(".")[2]: m.action for m in plan.modules}
    assert actions["c_fc"] == "average"
    assert actions["c_attn"] == "merge"
    with pytest.raises(MergeError, match="nowhere"):
        actmat.plan(None, [group / "a1", group / "a2"], roles=[{"match": "nowhere", "role": "linear"}])


def test_a_tensor_trained_in_full_by_one_and_adapted_by_another_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", "vit", 1, r=2, target_modules=["q_proj", "classifier"])
    save_adapter(tmp_path / "b", "vit", 2, r=2, target_modules=["q_proj"], modules_to_save=["classifier"])
    with pytest.raises(MergeError, match="trained in full in b and adapted in a"):
        merge(tmp_path, [tmp_path / "a", tmp_path / "b"])
    merge(tmp_path, [tmp_path / "a", tmp_path / "b"], keep=["classifier.*"])
    tiny("vit").save_pretrained(tmp_path / "base")
    actmat.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], out=tmp_path / "model", durable=False)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_a_start_that_changed_the_base_is_refused(start: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    edit_config(tmp_path, init_lora_weights=start)
    with open_adapter(tmp_path) as adapter:
        assert ["changed base" in p for p in adapter.problems] == [True]


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_a_start_that_left_the_base_alone_is_read(start: object, tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    edit_config(tmp_path, init_lora_weights=start)
    with open_adapter(tmp_path) as adapter:
        assert not adapter.problems


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_what_peft_converts_to_plain_lora_is_read_exactly(start: str, tmp_path: Path) -> None:
    """The published remedy: PEFT's own conversion doubles the rank, and its delta is that from the untouched base."""
    base = tiny("llama").float()
    before = {n: p.clone() for n, p in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "lora_" in n:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path / "raw")
    with open_adapter(tmp_path / "raw") as raw:
        assert any("changed base" in p for p in raw.problems)
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    trained = model.merge_and_unload().state_dict()
    with open_adapter(tmp_path / "plain") as plain:
        assert not plain.problems
        module = plain.modules["model.layers.1.self_attn.q_proj"]
        assert module.rank == 4
        name = f"{module.name}.weight"
        torch.testing.assert_close(
            plain.factors(module, torch.float32).dense(), trained[name] - before[name], rtol=1e-4, atol=1e-6
        )


def test_values_beyond_the_output_dtype_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", "llama", 1, **LLAMA)
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({n: torch.full_like(t, 1e6) for n, t in load_file(file).items()}, file)
    with pytest.raises(MergeError, match=r"_proj.*beyond torch.float16's range"):
        merge(tmp_path, [tmp_path / "a"], method="average", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_retries_of_the_truncation_are_in_the_record(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "svd")
    manifest = merge(tmp_path, [group / "a1", group / "a2"], method="average")
    assert [m["stats"].get("retries") for m in manifest["modules"]].count("jitter") == 1
