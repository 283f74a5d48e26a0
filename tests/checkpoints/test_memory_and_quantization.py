"""Checkpoints in memory, and the signs of quantized weights."""

from typing import Any

import pytest
import torch

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.memory import MemoryTensors
from actmat.checkpoints.quantization import quantization_problems
from actmat.errors import CheckpointError


def test_parameters_are_read_as_plain_tensors() -> None:
    module = torch.nn.Linear(3, 2)
    checkpoint = MemoryTensors(dict(module.named_parameters()))
    found = checkpoint.read("weight")
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert torch.equal(found, module.weight)


def test_ties_in_memory_are_aliases() -> None:
    shared = torch.ones(3, 2)
    checkpoint = MemoryTensors({"a": shared, "b": shared, "c": shared.clone(), "d": shared.view(2, 3)})
    assert checkpoint.aliases == {"b": "a"}


def test_a_lazily_negated_view_of_another_tensor_is_no_alias() -> None:
    shared = torch.ones(3, 2)
    checkpoint = MemoryTensors({"a": shared, "b": torch.complex(shared, shared).conj().imag, "c": shared._neg_view()})
    assert checkpoint.aliases == {}
    assert torch.equal(checkpoint.read("c"), -shared)
    assert torch.equal(checkpoint.read("b"), -shared)


def test_names_added_to_the_mapping_later_are_not_seen() -> None:
    tensors = {"a": torch.ones(2)}
    checkpoint = MemoryTensors(tensors)
    tensors["b"] = torch.ones(2)
    tensors["a"] = torch.zeros(3)
    assert set(checkpoint.specs) == {"a"}
    assert torch.equal(checkpoint.read("a"), torch.ones(2))


def test_every_entry_that_is_no_tensor_is_listed() -> None:
    bad: dict[Any, Any] = {
        "a": 1,
        3: torch.ones(1),
        "c": torch.ones(1, dtype=torch.complex64),
        "m": torch.empty(2, device="meta"),
        "fine": torch.ones(1),
    }
    with pytest.raises(CheckpointError) as caught:
        MemoryTensors(bad)
    assert len(caught.value.problems) == 4


def specs(*names_and_dtypes: tuple[str, str]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, (4, 4), dtype, "model.safetensors") for name, dtype in names_and_dtypes}


ORDINARY = specs(
    ("model.embed_tokens.weight", "bfloat16"),
    ("model.layers.0.mlp.experts.gate_up_proj", "bfloat16"),
    ("bert.embeddings.position_ids", "int64"),
    ("logit_scale", "float32"),
    ("swin.logit_scales", "float32"),
    ("attn.relative_position_index", "int64"),
    ("mask", "bool"),
)


@pytest.mark.parametrize("config", [None, {}, {"quantization_config": None}, {"quantization_config": {}}])
def test_ordinary_checkpoints_have_no_signs(config: dict[str, Any] | None) -> None:
    assert quantization_problems(ORDINARY, config) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([("l.qweight", "int32"), ("l.qzeros", "int32"), ("l.scales", "float16")], "GPTQ or AWQ"),
        ([("l.g_idx", "int32")], "GPTQ"),
        ([("l.weight", "int8"), ("l.SCB", "float32")], "bitsandbytes 8-bit"),
        ([("l.weight", "uint8"), ("l.weight.absmax", "float32")], "bitsandbytes 4-bit"),
        ([("l.weight", "uint32"), ("l.scales", "float16"), ("l.biases", "float16")], "uint32 weights"),  # of MLX
        ([("l.weight", "float8_e4m3fn"), ("l.weight_scale_inv", "float32")], "fp8 with block scales"),
        ([("l.weight", "float8_e5m2")], "float8_e5m2"),
        ([("l.weight_packed", "int32")], "compressed-tensors"),
        ([("m.gate_up_proj_blocks", "uint8"), ("m.gate_up_proj_scales", "uint8")], "MXFP4"),
    ],
)
def test_tensors_of_a_quantizer_are_recognized_without_a_config(names: list[tuple[str, str]], said: str) -> None:
    found = quantization_problems(ORDINARY | specs(*names), None)
    assert any(said in line for line in found)
    assert all("dequantized" in line for line in found)


def test_names_that_end_like_mxfp4_need_their_partner() -> None:
    assert quantization_problems(specs(("transformer_blocks", "uint8"), ("x_scales", "float32")), None) == []


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_a_config_that_declares_quantization_is_enough(method: str) -> None:
    declared = {"quantization_config": {"quant_method": method}}
    assert method in quantization_problems(ORDINARY, declared)[0]
    assert method in quantization_problems(ORDINARY, {"text_config": declared})[0]
