"""Merges of quantized models are those of their dequantized copies."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoint_files import save_folder, save_lora
from tests.helpers.quantized import Writer, compressed, fp8_blocks, mxfp4
from tests.helpers.tinymodels import made
from torch import Tensor

from actmat import merge, plan
from actmat.errors import MergeError
from actmat.report.verify import verify

# Merges of quantized models are those of their dequantized copies, byte by byte, and load.


SIZE, INNER = 64, 96


def llama(seed: int, near: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a tiny Llama in bfloat16; near another one if it is given."""
    sizes = {"hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = made("llama", seed=seed, **sizes, num_hidden_layers=2, vocab_size=80)
    state = {n: t.to(torch.bfloat16) for n, t in model.state_dict().items()}
    if near is not None:
        state = {n: (near[n].float() + 0.2 * t.float()).to(torch.bfloat16) for n, t in state.items()}
    return state, model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}


def is_coded(name: str) -> bool:
    return name.endswith("proj.weight")


def family(folder: Path, writers: list[tuple[Writer, dict[str, Any]] | None]) -> tuple[list[Path], list[Path]]:
    """Folders of base and experts, quantized by their writers, and of their dequantized copies."""
    coded, plain = [], []
    base, config = llama(0)
    for k, given in enumerate(writers):
        tensors = base if k == 0 else llama(k, base)[0]
        stored, read, own = {}, {}, dict(config)
        for name, tensor in tensors.items():
            if given is None or not is_coded(name):
                stored[name] = read[name] = tensor
                continue
            parts, read[name] = given[0](name, tensor)
            stored |= parts
        if given is not None:
            own["quantization_config"] = given[1]
        coded.append(save_folder(folder / f"coded{k}", stored, own))
        plain.append(save_folder(folder / f"plain{k}", read, config))
    return coded, plain


def block_writer() -> tuple[Writer, dict[str, Any]]:
    entry = {"quant_method": "fp8", "weight_block_size": [32, 48]}
    return lambda name, weight: fp8_blocks(name, weight, (32, 48)), entry


WRITERS: dict[str, Callable[[], tuple[Writer, dict[str, Any]]]] = {
    "fp8 blocks": block_writer,
    "fp8 channel": lambda: compressed(num_bits=8, type="float", symmetric=True, strategy="channel"),
    "int4 group": lambda: compressed(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
}


def same_tensors(one: Path, other: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert set(first) == set(second)
    for name in first:
        assert first[name].dtype == torch.bfloat16
        assert torch.equal(first[name].view(torch.int16), second[name].view(torch.int16)), name


@pytest.mark.parametrize("scheme", WRITERS)
@pytest.mark.parametrize("method", ["actmat", "ties"])
def test_output_is_that_of_dequantized_copies(scheme: str, method: str, tmp_path: Path) -> None:
    coded, plain = family(tmp_path, [WRITERS[scheme]()] * 3)
    report = merge(coded[0], coded[1:], out=tmp_path / "out", method=method, diagnose=True)
    merge(plain[0], plain[1:], out=tmp_path / "expected", method=method, executor="threads", threads=1)
    same_tensors(tmp_path / "out", tmp_path / "expected")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written == json.loads((tmp_path / "expected" / "config.json").read_text())
    coded_notes = [n["text"] for n in report.manifest["notes"] if "tensors as codes" in n["text"]]
    assert [text.partition(" stores ")[0] for text in coded_notes] == ["the base", "expert 'coded1'", "expert 'coded2'"]
    assert any("not quantized" in note["text"] for note in report.manifest["notes"])
    assert not any("not copied" in note["text"] for note in report.manifest["notes"])
    assert verify(tmp_path / "out").ok


def test_schemes_may_differ(tmp_path: Path) -> None:
    coded, plain = family(tmp_path, [None, WRITERS["fp8 blocks"](), WRITERS["int4 group"]()])
    found = plan(coded[0], coded[1:], method="average")
    notes = "\n".join(map(str, found.notes))
    assert "rounding errors of both" in notes
    assert re.search(r"'coded1' stores .* as codes \(float8_e4m3fn, one scale per block of 32x48\)", notes)
    assert re.search(r"'coded2' stores .* as codes \(int4 packed, one scale per 32 columns, zero points\)", notes)
    item = next(i for i in found.items if is_coded(i.name))
    assert item.cost.read_bytes < 3 * item.numel * 2
    merge(coded[0], coded[1:], out=tmp_path / "out", method="average")
    merge(plain[0], plain[1:], out=tmp_path / "expected", method="average")
    same_tensors(tmp_path / "out", tmp_path / "expected")


def test_stacks_of_experts_in_mxfp4(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"model_type": "gpt_oss", "dtype": "bfloat16", "num_local_experts": 2}
    entry = config | {"quantization_config": {"quant_method": "mxfp4"}}
    folders: dict[str, list[Path]] = {"coded": [], "plain": []}
    for k in range(2):
        weight = torch.randn(2, SIZE, 24, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
        stored, read = mxfp4(name, weight)
        folders["coded"].append(save_folder(tmp_path / f"coded{k}", stored, entry))
        folders["plain"].append(save_folder(tmp_path / f"plain{k}", {name: read}, config))
    for kind, (base, expert) in folders.items():
        merge(base, [expert], out=tmp_path / kind, method="actmat")
    same_tensors(tmp_path / "coded", tmp_path / "plain")


def test_an_adapter_is_added_to_the_decoded_base(tmp_path: Path) -> None:
    coded, plain = family(tmp_path, [WRITERS["int4 group"]()])
    noise = torch.Generator().manual_seed(1)
    factors = torch.randn(4, SIZE, generator=noise), torch.randn(SIZE, 4, generator=noise)
    adapter = save_lora(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": factors})
    for base, out in ((coded[0], "out"), (plain[0], "expected")):
        merge(base, [adapter], out=tmp_path / out, method="average", to="model")
    same_tensors(tmp_path / "out", tmp_path / "expected")
    with pytest.raises(MergeError, match="no field 'quantize'"):
        merge(coded[0], [adapter], out=tmp_path / "no", quantize="same")


def test_codes_are_never_cast(tmp_path: Path) -> None:
    """Codes whose scales are gone, or whose scheme is unknown, are refused, whatever the output's dtype."""
    coded, _ = family(tmp_path, [None, WRITERS["fp8 channel"]()])
    file = coded[1] / "model.safetensors"
    stored = load_file(file)
    lost = next(n for n in stored if n.endswith("weight_scale"))
    save_folder(
        coded[1], {n: t for n, t in stored.items() if n != lost}, json.loads((coded[1] / "config.json").read_text())
    )
    with pytest.raises(MergeError) as caught:
        merge(coded[0], coded[1:], out=tmp_path / "out", dtype="bfloat16", method="average")
    assert lost.removesuffix("_scale") in str(caught.value)
    assert not (tmp_path / "out").exists()
