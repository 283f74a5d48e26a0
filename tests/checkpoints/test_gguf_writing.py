"""GGUF files that are written: read back by the package gguf, by transformers and by our reader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.test_gguf import write_gguf
from tests.helpers.checkpoint_files import edit_json, save_folder, save_lora
from tests.helpers.gguf_files import HEADS, KV_HEADS
from tests.tolerances import F32_PRODUCT

import actmat
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import MergeError
from actmat.extras.gguf.names import ONE_ADDED


def metadata(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {f.name: f.contents() for f in GGUFReader(file).fields.values()}


def tensors(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {t.name: t for t in GGUFReader(file).tensors}


def as_checkpoint(file: Path, folder: Path) -> Path:
    """The tensors of a GGUF file as transformers has them, in safetensors."""
    with open_model(file) as opened:
        return save_folder(folder, {n: opened.tensors.read(n).clone() for n in opened.specs}, dict(opened.config or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gemma2", "gemma3"])
def test_what_was_read_is_written_again(architecture: str, tmp_path: Path) -> None:
    biases = ("attn_q", "attn_k") if architecture == "qwen2" else ()
    base = write_gguf(tmp_path / "base.gguf", "F16", architecture, biases=biases)
    model = as_checkpoint(base, tmp_path / "model")
    actmat.export(model, out=tmp_path / "out.gguf", to="gguf", like=str(base), type="f16")
    found, expected = tensors(tmp_path / "out.gguf"), tensors(base)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].tensor_type == tensor.tensor_type, name
        if architecture in ONE_ADDED and name.endswith("norm.weight"):  # 1 is taken off and added again
            np.testing.assert_allclose(found[name].data, tensor.data, rtol=0, atol=2.0**-22)
        else:
            assert np.array_equal(found[name].data, tensor.data), name
    dropped = {"GGUF.kv_count", "general.file_type"}
    one, other = metadata(tmp_path / "out.gguf"), metadata(base)
    assert {k: v for k, v in one.items() if k not in dropped | {"general.type"}} == {
        k: v for k, v in other.items() if k not in dropped
    }
    assert one["general.file_type"] == 1


@pytest.mark.parametrize(("kind", "exact"), [("f32", True), ("bf16", True), ("q8_0", False)])
def test_a_merged_model_loads_as_what_it_is(kind: str, exact: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = write_gguf(tmp_path / "base.gguf", "Q8_0")
    experts = [as_checkpoint(write_gguf(tmp_path / f"{k}.gguf", "Q8_0", seed=k), tmp_path / str(k)) for k in (1, 2)]
    actmat.merge(base, experts, method="average", out=tmp_path / "merged", scope="all")
    actmat.export(tmp_path / "merged", out=tmp_path / "gguf" / "m.gguf", to="gguf", like=str(base), type=kind)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="m.gguf", dtype=torch.float32)
    loaded = model.state_dict()
    with open_tensors(tmp_path / "gguf" / "m.gguf") as ours:
        assert set(ours.specs) == set(merged)
        for name, value in merged.items():
            theirs, read = loaded[name], ours.read(name).float()
            if exact:
                assert torch.equal(theirs, value.float()), name
                assert torch.equal(read, value.float()), name
            else:
                step = value.float().abs().amax(-1, keepdim=True) / 127  # at least a block's scale, which is a float16
                assert bool(((theirs - value.float()).abs() <= (0.5 + 127 * 2.0**-11) * step).all()), name


def two_modules(folder: Path, ranks: tuple[int, int] = (4, 4)) -> dict[str, torch.Tensor]:
    """An adapter of two modules of the tiny Llama; its deltas by module."""
    rng = torch.Generator().manual_seed(0)
    widths = zip(("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"), (64, 96), ranks, strict=True)
    pairs = {n: (torch.randn((r, width), generator=rng), torch.randn((64, r), generator=rng)) for n, width, r in widths}
    pattern = {"rank_pattern": {"down_proj": ranks[1]}} if ranks[0] != ranks[1] else {}
    named = {f"model.{name}": pair for name, pair in pairs.items()}
    save_lora(folder, named, lora_alpha=8, target_modules=["q_proj", "down_proj"], **pattern)
    return {name: 8 / len(a) * b @ a for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2)])
def test_an_adapter_is_one_of_llama_cpp(ranks: tuple[int, int], tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "F16")
    deltas = two_modules(tmp_path / "lora", ranks)
    actmat.export(tmp_path / "lora", out=tmp_path / "lora.gguf", to="gguf", like=str(base))
    keys, found = metadata(tmp_path / "lora.gguf"), tensors(tmp_path / "lora.gguf")
    assert (keys["general.architecture"], keys["general.type"], keys["adapter.type"]) == ("llama", "adapter", "lora")
    assert keys["adapter.lora.alpha"] == 8.0
    rows = (64 // HEADS // 2, 2)
    for there, name in (("blk.0.attn_q", "layers.0.self_attn.q_proj"), ("blk.1.ffn_down", "layers.1.mlp.down_proj")):
        a, b = (torch.tensor(found[f"{there}.weight.lora_{x}"].data) for x in "ab")
        delta = 8.0 / b.shape[1] * b @ a  # llama.cpp: alpha / rank
        expected = deltas[name]
        if "attn_q" in there:  # llama.cpp's own permutation of the rows of a Llama's q_proj
            expected = expected.view(HEADS, 2, rows[0], 64).transpose(1, 2).reshape(64, 64)
        torch.testing.assert_close(delta, expected, rtol=F32_PRODUCT, atol=F32_PRODUCT)
    assert KV_HEADS != HEADS


def test_refusals_say_what_to_do_and_leave_nothing(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "F16")
    model = as_checkpoint(base, tmp_path / "model")
    out = tmp_path / "out.gguf"

    def refused(words: str, location: Path = model, **options: str) -> str:
        with pytest.raises(MergeError, match=words) as caught:
            actmat.export(location, out=out, to="gguf", **options)
        assert not out.exists()
        return str(caught.value)

    assert "llama-quantize OUT.gguf OUT-q4_k_m.gguf Q4_K_M" in refused("got 'q4_k_m'", like=str(base), type="q4_k_m")
    assert "convert_hf_to_gguf.py" in refused("needs a GGUF file of the base")
    refused("is not a GGUF file", like=str(model))
    stored = load_file(model / "model.safetensors")
    head = tmp_path / "head"
    head.mkdir()
    save_file({**stored, "lm_head.weight": torch.ones(80, 64)}, head / "model.safetensors")
    assert "'lm_head.weight' has no counterpart" in refused("does not match", head, like=str(base))
    with pytest.raises(MergeError, match="Unknown export format 'ggfu'"):
        actmat.export(model, out=out, to="ggfu")
    with pytest.raises(MergeError, match="takes no option under; its options: like, type"):
        actmat.export(model, out=out, to="gguf", under="model")
    out.write_text("mine")
    with pytest.raises(MergeError, match="exists"):
        actmat.export(model, out=out, to="gguf", like=str(base))
    assert out.read_text() == "mine"


def test_no_entry_is_lost_in_silence(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "F16")
    stored = load_file(as_checkpoint(base, tmp_path / "model") / "model.safetensors")
    for number, (value, kind) in enumerate(((7e4, "f16"), (1e7, "q8_0"), (float("nan"), "bf16"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        changed = stored["model.layers.1.mlp.up_proj.weight"].float()
        changed[0, 0] = value
        save_file({**stored, "model.layers.1.mlp.up_proj.weight": changed}, folder / "model.safetensors")
        with pytest.raises(MergeError, match=r"blk\.1\.ffn_up\.weight': expected finite entries"):
            actmat.export(folder, out=tmp_path / "out.gguf", to="gguf", like=str(base), type=kind)
        assert not [p for p in tmp_path.iterdir() if "out.gguf" in p.name and "lock" not in p.name]


def test_an_adapter_without_effect_and_one_that_is_not_read(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "F16")
    two_modules(tmp_path / "lora")
    config = tmp_path / "lora" / "adapter_config.json"
    edit_json(config, lora_alpha=0)
    said = actmat.export(tmp_path / "lora", out=tmp_path / "zero.gguf", to="gguf", like=str(base))
    assert said.startswith("4 tensors: 4 F32\nnote: its alpha (lora_alpha) is 0 in every module")
    assert metadata(tmp_path / "zero.gguf")["adapter.lora.alpha"] != 0  # llama.cpp takes 0 for a scaling of 1
    assert not tensors(tmp_path / "zero.gguf")["blk.0.attn_q.weight.lora_b"].data.any()
    edit_json(config, lora_alpha=8, r=8)
    with pytest.raises(MergeError, match="cannot be read as an adapter"):
        actmat.export(tmp_path / "lora", out=tmp_path / "wrong.gguf", to="gguf", like=str(base))


@pytest.mark.parametrize("changed", [{}, {"rms_norm_eps": 1e-2}, {"rope_theta": 1e6}])
def test_metadata_of_another_base_are_not_copied(changed: dict[str, float], tmp_path: Path) -> None:
    """A file's metadata say what llama.cpp computes: a model that computes otherwise cannot be written with them."""
    base = write_gguf(tmp_path / "base.gguf", "F16")
    model = as_checkpoint(base, tmp_path / "model")
    edit_json(model / "config.json", rope_parameters=None, **changed)
    arguments: dict[str, Any] = {"out": tmp_path / "out.gguf", "to": "gguf", "like": str(base), "type": "f16"}
    if not changed:
        actmat.export(model, **arguments)
        return
    with pytest.raises(MergeError, match=f"(?s)cannot be written with the metadata of .*{next(iter(changed))}.* Fix: "):
        actmat.export(model, **arguments)
    assert not (tmp_path / "out.gguf").exists()


REMARKS: dict[str, tuple[str, str, str]] = {
    "a length": ("config.json", '{"max_position_embeddings": 9}', "are written as in the base: max_position"),
    "a template": ("chat_template.jinja", "{{ other }}", "note: headers differ in tokenizer.chat_template ('model')"),
    "other weights": ("projector.pt", "any", "warning: expert 'model' has weights beside its model"),
}


@pytest.mark.parametrize("case", REMARKS)
def test_what_the_copied_metadata_lose_is_said(case: str, tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "F16")
    model = as_checkpoint(base, tmp_path / "model")
    arguments: dict[str, Any] = {"to": "gguf", "like": str(base), "type": "f16"}
    name, text, wanted = REMARKS[case]
    assert wanted not in actmat.export(model, out=tmp_path / "before.gguf", **arguments)
    held = json.loads((model / name).read_text()) | json.loads(text) if name == "config.json" else None
    (model / name).write_text(text if held is None else json.dumps(held))
    assert wanted in actmat.export(model, out=tmp_path / "out.gguf", **arguments)
