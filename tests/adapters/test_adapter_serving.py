"""What vLLM's loader demands of an adapter, checked on what was written; vLLM itself does not run on a plain CPU.

The demands are those of its published sources (`vllm/lora/peft_helper.py`, `vllm/lora/lora_model.py`,
`vllm/lora/utils.py`, `vllm/config/lora.py`, versions 0.6 to 0.22), told again by `refusals` below.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.adapters.test_adapter_to_adapter import KINDS, merge
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import save_lora

from actmat.extras.serving import VLLM_RANKS, serving_commands

LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Linear layers of a Llama by the last part of their names, all of which vLLM adapts."""


def refusals(folder: Path, max_lora_rank: int) -> list[str]:
    """Why vLLM would not load the adapter, or would compute something else with it than PEFT."""
    out = []
    config = json.loads((folder / "adapter_config.json").read_text())
    out += [f"no {key}" for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if config.get("modules_to_save"):
        out.append("modules_to_save")
    if config.get("bias", "none") != "none":
        out.append("bias")
    if config.get("use_dora"):
        out.append("DoRA")
    if config["r"] > max_lora_rank:
        out.append(f"rank {config['r']}")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        out.append("patterns are not read")
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        *module, side, leaf = name.removeprefix("base_model.model.").split(".")
        if side not in ("lora_A", "lora_B") or leaf != "weight":
            out.append(f"{name} is no factor")
        elif module[-1] not in LAYERS:
            out.append(f"{name} belongs to no layer that is adapted")
        elif tensor.ndim != 2 or tensor.shape[0 if side == "lora_A" else 1] > config["r"]:
            out.append(f"{name} is {tuple(tensor.shape)}, rank {config['r']}")
    return out


def served(folder: Path) -> dict[str, torch.Tensor]:
    """The deltas that vLLM adds: `lora_alpha / r`, or with its root, times `B A`, whatever the patterns say."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    stored = load_file(folder / "adapter_model.safetensors")
    modules = [n.removesuffix(".lora_A.weight") for n in stored if n.endswith("lora_A.weight")]
    return {
        m.removeprefix("base_model.model."): scaling * stored[f"{m}.lora_B.weight"] @ stored[f"{m}.lora_A.weight"]
        for m in modules
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters with other ranks, scalings and modules each, which vLLM could not serve together as one."""
    folder = tmp_path_factory.mktemp("llama")
    options: dict[str, Any] = {"use_rslora": True, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 1}}
    save_adapter(folder / "one", "llama", 1, **LLAMA, **options)
    save_adapter(folder / "two", "llama", 2, r=3, target_modules=["q_proj", "gate_proj"])
    return folder


@pytest.mark.parametrize("fields", [{}, {"ranks": "uniform"}, {"rank": 4}, {"rank": 16, "method": "ties"}])
def test_a_uniform_adapter_is_served_as_peft_loads_it(fields: dict[str, Any], pair: Path, tmp_path: Path) -> None:
    merge(tmp_path, [pair / "one", pair / "two"], **fields)
    assert refusals(tmp_path / "out", max_lora_rank=16) == []
    base = tiny("llama")
    before = {n: p.clone() for n, p in base.state_dict().items()}
    after = PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload().state_dict()
    found = served(tmp_path / "out")
    for name, weight in after.items():
        delta = found.get(name.removesuffix(".weight"), torch.zeros_like(weight))
        torch.testing.assert_close(weight - before[name], delta, rtol=1e-10, atol=1e-12)
    assert "--max-lora-rank" not in serving_commands(str(tmp_path / "out")).vllm


def notes(folder: Path, experts: list[Path], **fields: Any) -> str:
    """Notes on serving an output; the sources' demands on what is written must agree."""
    merge(folder, experts, **fields)
    serving = serving_commands(str(folder / "out"))
    assert bool(refusals(folder / "out", VLLM_RANKS[-1])) == (not serving.vllm), serving
    return " ".join(serving.notes)


def test_serving_commands_say_what_vllm_would_refuse(pair: Path, tmp_path: Path) -> None:
    said = notes(tmp_path / "ranks", [pair / "one", pair / "two"], ranks="pattern")
    assert "ranks=uniform" in said
    words = {"modules_to_save": "full tensors", "bias": "biases", "lora_bias": "biases", "parameters": "bare"}
    for kind, word in words.items():
        family, options = KINDS[kind]
        save_adapter(tmp_path / kind / "a", family, 1, **options)
        assert word in notes(tmp_path / kind, [tmp_path / kind / "a"], method="average")


@pytest.mark.parametrize(
    ("rank", "said"),
    [(16, ""), (17, "--max-lora-rank 32"), (300, "--max-lora-rank 320"), (512, "512"), (513, "maximum, 512")],
)
def test_serving_commands_say_which_rank_to_start_vllm_with(rank: int, said: str, tmp_path: Path) -> None:
    modules = {"model.layers.0.mlp.up_proj": (torch.ones(rank, 520), torch.ones(520, rank))}
    save_lora(tmp_path / "a", modules, task_type="CAUSAL_LM")
    merge(tmp_path, [tmp_path / "a"], method="average")
    serving = serving_commands(str(tmp_path / "out"))
    assert said in " ".join((serving.vllm, *serving.notes))
    assert ("--max-lora-rank" in serving.vllm) == (16 < rank <= 512)
    assert bool(refusals(tmp_path / "out", VLLM_RANKS[-1])) == (not serving.vllm)
