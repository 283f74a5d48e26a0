"""Adapters of every kind, and what of them is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import edit_config
from tests.helpers.located import is_adapter, open_adapter
from torch import Tensor

from actmat.errors import CheckpointError

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", LLAMA),
    "rslora": ("llama", {**LLAMA, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            **LLAMA,
            "rank_pattern": {"v_proj": 5, r"layers\.1\..*down_proj": 3},
            "alpha_pattern": {"0.self_attn.q_proj": 3},
        },
    ),
    "patterns_rslora": ("llama", {**LLAMA, "use_rslora": True, "rank_pattern": {"v_proj": 5}}),
    "conv1d_of_gpt2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "embedding": ("gpt2", {"r": 3, "target_modules": ["wpe"]}),
    "convolutions": (
        "vision",
        {"r": 2, "lora_alpha": 3, "target_modules": ["line", "plane", "point", "solid", "head"]},
    ),
    "parameters": ("mixtral", {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "one_parameter": ("mixtral", {"r": 3, "lora_alpha": 5, "target_parameters": ["mlp.experts.down_proj"]}),
    "bias": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "bias_of_adapted": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "lora_bias": ("gpt2", {"r": 2, "target_modules": ["c_fc"], "fan_in_fan_out": True, "lora_bias": True}),
    "modules_to_save": ("vit", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
}


def test_weights_of_torch_are_those_of_safetensors(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    torch.save(stored, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    assert is_adapter(tmp_path)
    with open_adapter(tmp_path) as adapter:
        assert not adapter.problems
        assert all(torch.equal(adapter.weights.read(name), value) for name, value in stored.items())


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("peft_type", "LOHA", "only LoRA adapters have factors"),
        ("peft_type", "SOMETHING", "only LoRA"),
        ("use_dora", True, "DoRA"),
        ("alora_invocation_tokens", [1, 2], "activated LoRA"),
        ("use_qalora", True, "QA-LoRA"),
        ("trainable_token_indices", [3], "trainable tokens"),
        ("r", 0, "positive integer rank"),
        ("lora_alpha", None, "lora_alpha"),
        ("rank_pattern", {"(": 3}, "not a pattern"),
        ("r", 3, "adapter_config.json says 3"),
        ("r", 10**60, "adapter_config.json: expected a positive integer rank 'r' of at most 2147483647, found 1000"),
        ("lora_alpha", 10**60, "adapter_config.json: expected a finite number 'lora_alpha' of at most 3.40282e+38"),
        ("lora_alpha", 1e308, "found 1e+308"),
        (
            "rank_pattern",
            {"q_proj": 10**60},
            "rank_pattern: expected a pattern with a number, found 'q_proj' with 1000",
        ),
        (
            "alpha_pattern",
            {"q_proj": 1e308},
            "alpha_pattern: expected a pattern with a number, found 'q_proj' with 1e+308",
        ),
    ],
)
def test_what_has_no_low_rank_delta_is_named(field: str, value: object, word: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    edit_config(tmp_path, **{field: value})
    with open_adapter(tmp_path) as adapter:
        assert any(word in p for p in adapter.problems), adapter.problems


@pytest.mark.parametrize(
    ("kind", "words"),
    [("HRAConfig", "only LoRA adapters have factors"), ("PromptTuningConfig", "virtual tokens before an input")],
)
def test_an_adapter_of_another_family_is_one_problem(kind: str, words: str, tmp_path: Path) -> None:
    import peft

    fields = {"num_virtual_tokens": 2} if kind.startswith("Prompt") else {"target_modules": ["q_proj"]}
    peft.get_peft_model(tiny("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **fields)).save_pretrained(tmp_path)
    with open_adapter(tmp_path) as adapter:
        (problem,) = adapter.problems
    assert words in problem


def test_a_number_of_hundreds_of_digits_is_no_field(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    edit_config(tmp_path, r=10**400)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: expected JSON, found a number of 401 digits"):
        open_adapter(tmp_path)


def edit_tensors(folder: Path, change: Any) -> None:
    from safetensors.torch import save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_factors_in_8_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    edit_tensors(tmp_path, lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}))
    with open_adapter(tmp_path) as adapter:
        assert all("is float8_e4m3fn" in p or "is missing" in p for p in adapter.problems)
        assert len(adapter.problems) == len(adapter.weights.specs)


def test_every_damaged_module_is_listed_at_once(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    stem = "base_model.model.model.layers.0.self_attn"

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{stem}.q_proj.lora_B.weight"]
        tensors[f"{stem}.v_proj.lora_A.weight"] = torch.zeros(3, 16)
        tensors[f"{stem}.o_proj.lora_magnitude_vector"] = torch.zeros(4)

    edit_tensors(tmp_path, damage)
    with open_adapter(tmp_path) as adapter:
        text = "\n".join(adapter.problems)
    assert len(adapter.problems) == 3
    assert "half of a pair" in text
    assert "lora_A has rank 3, lora_B has rank 2" in text
    assert "DoRA" in text


def test_an_attention_whose_output_delta_peft_adds_twice_is_refused(tmp_path: Path) -> None:
    """If PEFT stops doing so, the first half fails: read such adapters then, by the version that wrote them."""
    options: dict[str, Any] = {"r": 2, "target_modules": ["attention"]}
    merged = save_adapter(tmp_path, "vision", 1, **options)
    name = "attention.out_proj.weight"
    stored = load_file(tmp_path / "adapter_model.safetensors")
    stem = "base_model.model.attention.base_layer.out_proj"
    delta = 8 / 2 * stored[f"{stem}.lora_B.weight"] @ stored[f"{stem}.lora_A.weight"]
    torch.testing.assert_close(merged[name] - tiny("vision").state_dict()[name], 2 * delta)
    with open_adapter(tmp_path) as adapter:
        assert ["adds its delta twice" in p for p in adapter.problems] == [True]


def test_a_full_checkpoint_is_no_adapter(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert not is_adapter(tmp_path)
    assert not is_adapter(tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "x.pt")
    assert not is_adapter(tmp_path / "x.pt")


def test_a_config_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with pytest.raises(CheckpointError, match="neither"):
        open_adapter(tmp_path)
