"""Adapters and models as other programs leave them: accepted where they are valid, else named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_folder
from tests.tolerances import F32_ELEMENTWISE, relative_error
from torch import Tensor

import actmat
from actmat.checkpoints.folder import may_be_weights
from actmat.errors import MergeError
from actmat.extras.diffusion.metadata import alpha_notes
from actmat.layout.renamed import LEGACY

FLAT, DOTTED = "input_blocks_1_1_proj_in", "model.diffusion_model.input_blocks.1.1.proj_in.weight"


@pytest.mark.parametrize(
    "name",
    [
        *("rng_state.pth", "rng_state_0.pth", "rng_state_11.pth", "optimizer.pt", "optimizer.bin", "optimizer_1.bin"),
        *("scheduler.pt", "scheduler_1.bin", "scaler.pt", "sampler.bin", "sampler_1.bin", "dl_state_dict_0.bin"),
        *("training_args.bin", "recipe_state.pt", "adapter_model.safetensors", "adapter_model.bin"),
    ],
)
def test_states_of_training_are_no_weights(name: str) -> None:
    assert not may_be_weights(name)
    assert may_be_weights("model_" + name)


def lora(prefix: str, alpha: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(len(prefix))
    down, up = torch.randn(4, 16), torch.randn(16, 4)
    return {f"{prefix}.lora_down.weight": down, f"{prefix}.lora_up.weight": up, f"{prefix}.alpha": alpha}


@pytest.mark.parametrize("prefix", ["lycoris_", "lora_unet_"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16, torch.float32])
def test_a_scale_is_a_number_of_any_dtype(tmp_path: Path, prefix: str, dtype: torch.dtype) -> None:
    base = {DOTTED: torch.randn(16, 16)}
    save_file(base, tmp_path / "base.safetensors")
    tensors = lora(prefix + FLAT, torch.tensor(2, dtype=dtype))
    save_file(tensors, tmp_path / "lora.safetensors")
    actmat.merge(
        tmp_path / "base.safetensors",
        [tmp_path / "lora.safetensors"],
        out=tmp_path / "out",
        method="linear",
        to="model",
    )
    down, up, _ = (t.double() for t in tensors.values())
    right = base[DOTTED].double() + 2 / 4 * up @ down
    assert relative_error(load_file(tmp_path / "out/model.safetensors")[DOTTED], right) < F32_ELEMENTWISE


@pytest.mark.parametrize(
    ("metadata", "is_said"),
    [
        ({"lora_alpha": "8", "lora_rank": "64"}, True),
        ({"ss_network_alpha": "1.0"}, True),
        ({"lora_config": '{"r": 64, "lora_alpha": 16}'}, True),
        ({"lora_alpha": "64.0"}, False),
        ({"ss_v2": "False"}, False),
        ({}, False),
    ],
)
def test_a_scale_in_metadata_only_is_told(metadata: dict[str, str], is_said: bool) -> None:
    assert bool(alpha_notes(metadata, [64])) == is_said


@pytest.mark.parametrize(
    ("names", "word"),
    [(("lora_a", "lora_b"), "MLX"), (("lora_a.weight", "lora_b.weight"), "torchtune")],
)
def test_the_writer_of_foreign_factors_is_named(tmp_path: Path, names: tuple[str, str], word: str) -> None:
    save_file({"model.q_proj.weight": torch.eye(8)}, tmp_path / "base.safetensors")
    save_file({f"model.q_proj.{n}": torch.randn(8, 8) for n in names}, tmp_path / "adapters.safetensors")
    with pytest.raises(MergeError, match=word):
        actmat.plan(tmp_path / "base.safetensors", [tmp_path / "adapters.safetensors"])


def test_legacy_names_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.conversion_mapping").get_checkpoint_conversion_mapping("legacy")
    pairs = {(c.source_patterns[0].replace("\\", ""), c.target_patterns[0].replace("\\", "")) for c in mapping}
    own = {(old, new) for old, new in pairs if not old.startswith(("^", "model", "language"))}
    assert own == set(LEGACY)


@pytest.mark.parametrize(("old", "new"), LEGACY)
@pytest.mark.parametrize("is_base_old", [True, False])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_either_form_of_a_legacy_name_is_matched(
    tmp_path: Path, old: str, new: str, is_base_old: bool, prefix: str
) -> None:
    base, expert = (torch.randn(6, generator=torch.Generator().manual_seed(s)) for s in range(2))
    forms = (f"a.{old.lstrip('.')}", f"a.{new.lstrip('.')}")
    mine, theirs = forms if is_base_old else forms[::-1]
    save_file({mine: base, "w.weight": torch.ones(4, 4)}, tmp_path / "base.safetensors")
    save_file({prefix + theirs: expert, prefix + "w.weight": torch.ones(4, 4)}, tmp_path / "expert.safetensors")
    report = actmat.merge(
        tmp_path / "base.safetensors", [tmp_path / "expert.safetensors"], out=tmp_path / "out", method="linear"
    )
    torch.testing.assert_close(load_file(tmp_path / "out/model.safetensors")[mine], expert)
    assert any("under other names" in str(n) for n in report.plan.notes)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "fp8", "bitnet", "unknown"])
@pytest.mark.parametrize("has_scale", [False, True])
def test_a_leftover_of_quantization(tmp_path: Path, method: str, has_scale: bool) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    for name in ("base", "expert"):
        tensors = {"model.layers.0.q_proj.weight": torch.randn(8, 8)}
        tensors |= {"model.layers.0.q_proj.k_scale": torch.ones(1)} if has_scale else {}
        save_folder(tmp_path / name, tensors, config)
    if has_scale or method in ("bitnet", "unknown"):
        with pytest.raises(MergeError, match="quantized"):
            actmat.plan(tmp_path / "base", [tmp_path / "expert"])
        return
    report = actmat.merge(tmp_path / "base", [tmp_path / "expert"], out=tmp_path / "out", method="linear")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert any(method in str(note) for note in report.plan.notes)


@pytest.mark.parametrize(
    ("absent", "ties", "is_right"),
    [
        ("lm_head.weight", True, True),
        ("lm_head.weight", False, False),
        ("lm_head.weight", None, False),
        ("model.norm.weight", True, False),
    ],
)
def test_a_name_that_an_index_lists_and_no_shard_holds(
    tmp_path: Path, absent: str, ties: bool | None, is_right: bool
) -> None:
    config = {"model_type": "llama"} | ({} if ties is None else {"tie_word_embeddings": ties})
    tensors = {"model.embed_tokens.weight": torch.randn(10, 8), "model.layers.0.mlp.up_proj.weight": torch.randn(8, 8)}
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"weight_map": dict.fromkeys((*tensors, absent), "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if is_right:
        assert len(actmat.plan(tmp_path, [tmp_path]).items) == len(tensors)
        return
    with pytest.raises(MergeError, match=absent):
        actmat.plan(tmp_path, [tmp_path])
