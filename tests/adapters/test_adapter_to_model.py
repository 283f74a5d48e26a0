"""Adapters merged into a full model, alone and together with full experts; PEFT's own merge is the oracle."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapter_reading import CASES
from tests.helpers.adapters import LLAMA, STACKS, save_adapter, save_groups, tiny
from tests.helpers.checkpoint_files import save_folder, save_lora
from torch import Tensor

import actmat
from actmat.errors import MergeError
from actmat.report.verify import verify

FAMILIES = {k: v for k, v in CASES.items() if v[0] != "vision"}


def merge(folder: Path, base: Path, experts: list[Any], out: str = "out", **fields: Any) -> Any:
    settings: dict[str, Any] = {"compute_dtype": "float64", "durable": False, "threads": 1} | fields
    return actmat.merge(base, experts, out=folder / out, **settings)


def load(folder: Path, family: str) -> dict[str, Tensor]:
    """State dict of the model that transformers loads."""
    return dict(type(tiny(family)).from_pretrained(folder, dtype=torch.float64).state_dict())


@pytest.mark.parametrize("case", FAMILIES)
def test_one_adapter_gives_what_peft_merges(case: str, tmp_path: Path) -> None:
    family, options = FAMILIES[case]
    tiny(family).save_pretrained(tmp_path / "base")
    expected = save_adapter(tmp_path / "adapter", family, 1, **options)
    report = merge(tmp_path, tmp_path / "base", [tmp_path / "adapter"], method="average")
    found = load(tmp_path / "out", family)
    base = tiny(family).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
        if torch.equal(value, base[name]):
            assert torch.equal(found[name], base[name]), f"{name} was recomputed"
    assert any(t.action == "copy" for t in report.plan.items)
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("method", ["actmat", "tsv", "iso_c", "wudi", "knots", "ties", "task_arithmetic"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_factors_give_what_full_experts_give(method: str, family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "llama": LLAMA,
        "gpt2": {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        "mixtral": STACKS,
    }[family]
    place = save_groups(tmp_path, {family: [options] * 2}) / family
    adapters = merge(tmp_path, place / "base", [place / "a1", place / "a2"], "from_a", method=method)
    merge(tmp_path, place / "base", [place / "m1", place / "m2"], "from_m", method=method)
    merge(tmp_path, place / "base", [place / "a1", place / "m2"], "mixed", method=method)
    assert any(t.is_factored for t in adapters.plan.items) == (method in ("actmat", "tsv", "iso_c", "wudi"))
    want = load_file(tmp_path / "from_m" / "model.safetensors")
    for out in ("from_a", "mixed"):
        found = load_file(tmp_path / out / "model.safetensors")
        for name, value in want.items():
            error = float((found[name] - value).norm() / value.norm().clamp_min(1e-3))
            assert error <= 1e-8, (out, name, error)
    assert verify(tmp_path / "mixed").ok


def test_the_adapter_of_another_model_is_refused_with_all_modules(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "gpt2", 1, r=2, target_modules=["c_fc"], fan_in_fan_out=True)
    with pytest.raises(MergeError) as error:
        merge(tmp_path, tmp_path / "base", [tmp_path / "adapter"])
    assert str(error.value).count("finds no tensor in the base") == 2
    assert not (tmp_path / "out").exists()


def test_plan_lists_what_adapters_change(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    for n in (1, 2):
        save_adapter(tmp_path / f"a{n}", "llama", n, **LLAMA)
    plan = actmat.plan(tmp_path / "base", [tmp_path / "a1", tmp_path / "a2"], method="ct_merging")
    assert plan.output == "model"
    changed = [t for t in plan.items if t.action == "merge"]
    assert len(changed) == 6
    assert all("in factored form" in t.reason for t in changed)
    assert all(t.reason == "no adapter changes it: copied from the base" for t in plan.items if t.action == "copy")


def test_where_deltas_cannot_be_walked_the_plan_pays_for_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DARE streams full experts; what adapters form is held whole, and so are all deltas on an accelerator."""
    monkeypatch.setattr(sys.modules["actmat.planning.cost"], "CHUNK_ENTRIES", 16)  # smaller than the tiny tensors
    base = tmp_path / "base"
    tiny("llama").save_pretrained(base)
    for name in ("m", "n"):
        tiny("llama").save_pretrained(tmp_path / name)
    save_adapter(tmp_path / "a", "llama", 1, **LLAMA)
    full = actmat.plan(base, [tmp_path / "m", tmp_path / "n"], method="dare", scope="all")
    mixed = actmat.plan(base, [tmp_path / "m", tmp_path / "a"], method="dare", scope="all")
    device = actmat.plan(base, [tmp_path / "m", tmp_path / "n"], method="dare", scope="all", device="cuda")
    assert full.output == "model"
    assert mixed.output == "model"
    adapted = {t.name for t in mixed.items if t.action == "merge"}
    assert adapted
    for one, two, three in zip(full.items, mixed.items, device.items, strict=True):
        if one.name not in adapted:
            continue
        more = 4 * 2 * (math.prod(one.shape) - 16)  # two deltas in float32, whole rather than in places of 16 entries
        assert two.cost.host_bytes - one.cost.host_bytes == more
        assert three.cost.device_bytes > 4 * 2 * math.prod(one.shape)


@pytest.mark.parametrize(
    ("begins", "trained"),
    [
        ("model.language_model.", "model."),
        ("language_model.model.", "model.language_model."),
        ("model.", "model.language_model."),
    ],
)
def test_an_adapter_of_the_text_model_fits_the_language_model_of_a_multimodal_one(
    begins: str, trained: str, tmp_path: Path
) -> None:
    """Beside a vision tower whose layers have the same names."""
    text = tiny("llama").state_dict()
    vision = {f"{begins}visual.{n.removeprefix('model.')}": t.clone() for n, t in text.items() if ".layers." in n}
    base = {n.replace("model.", begins, 1): t.clone() for n, t in text.items()} | vision
    save_folder(tmp_path / "base", base)
    expected = save_adapter(tmp_path / "a", "llama", 1, **LLAMA)
    file = tmp_path / "a" / "adapter_model.safetensors"
    stored = {
        n.replace("base_model.model.model.", f"base_model.model.{trained}"): t for n, t in load_file(file).items()
    }
    save_file(stored, file)
    run: dict[str, Any] = {"method": "linear", "compute_dtype": "float64", "durable": False, "threads": 1}
    actmat.merge(tmp_path / "base", [tmp_path / "a"], out=tmp_path / "out", **run)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {n.replace("model.", begins, 1): t for n, t in expected.items()} | vision
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("named", "is_said"),
    [("meta/Tiny-Instruct", True), ("meta/tiny", False), ("unsloth/Tiny-bnb-4bit", False), ("/models/x", False)],
)
def test_a_base_of_another_name_than_the_adapters_is_said(
    named: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_folder(Path("org/Tiny"), {"layer.weight": torch.zeros(4, 4)})
    save_lora(Path("a"), {"layer": (torch.ones(2, 4), torch.ones(4, 2))}, base_model_name_or_path=named)
    notes = [n.text for n in actmat.plan("org/Tiny", ["a"], method="average").notes if "as their base" in n.text]
    said = "adapters name 'meta/Tiny-Instruct' as their base, and are merged into org/Tiny: is it the same model?"
    assert notes == [said] * is_said
