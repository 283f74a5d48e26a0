"""Codecs against the libraries that define their layouts, bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.quantized import Stored, compressed, fp8_blocks, fp8_scaled, mxfp4
from torch import Tensor

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.codecs.quantized import QuantizedTensors
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.errors import CheckpointError

NAME = "model.layers.0.mlp.down_proj.weight"


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).mul_(0.05).to(dtype)


def same_everywhere(stored: Tensors, name: str, expected: Tensor) -> None:
    """The whole tensor, and odd runs of its bytes, are those expected."""
    found = stored.read(name)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
    wanted = bytes(raw_bytes(expected.contiguous()))
    size = len(wanted)
    for start, length in ((0, 1), (1, 7), (size // 3, size // 2), (size - 5, 5), (size, 0)):
        out = memoryview(bytearray(length))
        stored.read_into(name, start, out)
        assert out == wanted[start : start + length]


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
ACTIVATIONS = {"activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}}
INT4 = {"num_bits": 4, "type": "int"}
SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "fp8 per tensor": (FP8 | {"strategy": "tensor"}, "float8_e4m3fn, one scale per tensor"),
    "fp8 per channel": (FP8 | {"strategy": "channel"}, "float8_e4m3fn, one scale per row"),
    "fp8 per block": (FP8 | {"strategy": "block", "block_structure": [16, 32]}, "one scale per block of 16x32"),
    "int8 per tensor": (INT8 | ACTIVATIONS | {"strategy": "tensor"}, "int8, one scale per tensor"),
    "int8 per channel": (INT8 | ACTIVATIONS | {"strategy": "channel"}, "int8, one scale per row"),
    "int8 alone": (INT8 | {"strategy": "channel"}, "int8 packed, one scale per row"),
    "int8 with zero points": (
        INT8 | ACTIVATIONS | {"strategy": "channel", "symmetric": False},
        "int8, one scale per row",
    ),
    "int4 per group": (INT4 | {"strategy": "group", "group_size": 32, "symmetric": True}, "int4 packed"),
    "int4 per channel": (INT4 | {"strategy": "channel", "symmetric": True}, "one scale per row"),
    "int4 with zero points": (INT4 | {"strategy": "group", "group_size": 16, "symmetric": False}, "zero points"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compressed_tensors_reads_the_same(scheme: str, dtype: str, tmp_path: Path) -> None:
    arguments, words = SCHEMES[scheme]
    write, entry = compressed(**arguments)
    stored, expected = write(NAME, noise(48, 96, dtype=getattr(torch, dtype)))
    save_folder(tmp_path, stored | {"norm.weight": torch.ones(3)}, {"dtype": dtype, "quantization_config": entry})
    with open_model(tmp_path) as checkpoint:
        assert set(checkpoint.specs) == {NAME, "norm.weight"}
        assert words in checkpoint.tensors.parts(NAME)[1]
        parts, _ = checkpoint.tensors.parts(NAME)
        assert sum(p.nbytes for p in parts) == sum(t.nbytes for t in stored.values())
        same_everywhere(checkpoint.tensors, NAME, expected)
        assert checkpoint.config == {"dtype": dtype} == checkpoint.folder.written["config.json"]


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (130, 1), (1, 257), (3, 140, 130)])
def test_fp8_blocks_with_ragged_edges(shape: tuple[int, ...], tmp_path: Path) -> None:
    stored, expected = fp8_blocks(NAME, noise(*shape))
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    save_folder(tmp_path, stored, {"torch_dtype": "bfloat16", "quantization_config": entry})
    with open_model(tmp_path) as checkpoint:
        assert list(checkpoint.specs) == [NAME]
        same_everywhere(checkpoint.tensors, NAME, expected)


def test_wide_tensors_are_decoded_window_by_window(tmp_path: Path) -> None:
    stored, expected = fp8_blocks(NAME, noise(700, 500))
    with open_model(save_folder(tmp_path, stored)) as checkpoint:
        same_everywhere(checkpoint.tensors, NAME, expected)
        assert 0 < checkpoint.tensors.buffer_bytes < 8_000_000


def test_single_files_of_image_tools(tmp_path: Path) -> None:
    stored, expected = fp8_scaled(NAME, noise(24, 40))
    stored |= {"scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn), "img_in.bias": torch.ones(3)}
    stored[NAME.replace("weight", "comfy_quant")] = torch.tensor([*b'{"format": "float8_e4m3fn"}'], dtype=torch.uint8)
    folder = save_folder(tmp_path, stored)
    with open_model(folder / "model.safetensors") as checkpoint:
        assert set(checkpoint.specs) == {"img_in.bias", NAME}
        same_everywhere(checkpoint.tensors, NAME, expected)


@pytest.mark.parametrize("shape", [(2, 64, 48), (3, 32, 7)])
def test_mxfp4_reads_as_transformers_does(shape: tuple[int, ...], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored, expected = mxfp4(name, noise(*shape))
    save_folder(tmp_path, stored, {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}})
    with open_model(tmp_path) as checkpoint:
        assert checkpoint.specs[name].shape == shape
        same_everywhere(checkpoint.tensors, name, expected)


def test_handles_open_the_decoded_tensors(tmp_path: Path) -> None:
    stored, expected = fp8_blocks(NAME, noise(130, 140))
    with open_tensors(save_folder(tmp_path, stored)) as first, open_handle(first.handle()) as again:
        assert again.specs == first.specs
        same_everywhere(again, NAME, expected)


def test_tensors_in_memory_are_decoded(tmp_path: Path) -> None:
    stored, expected = fp8_blocks(NAME, noise(130, 140))
    with open_model(stored) as checkpoint:
        same_everywhere(checkpoint.tensors, NAME, expected)


def edited(stored: Stored, change: Callable[[Stored], object]) -> Stored:
    change(stored)
    return stored


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(7, 3)}), "match no block"),
        (lambda t: t.update({f"{NAME}_zero_point": torch.ones(5)}), "zero_point"),
        (lambda t: t.update({f"{NAME}_g_idx": torch.ones(5, dtype=torch.int32)}), "g_idx"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: Callable[[Stored], object], says: str, tmp_path: Path) -> None:
    stored = edited(fp8_blocks(NAME, noise(130, 140))[0], change)
    with pytest.raises(CheckpointError, match=says):
        open_tensors(save_folder(tmp_path, stored))


@pytest.mark.parametrize(
    ("scheme", "columns", "more", "says"),
    [
        ("int4 per group", 64, {f"{NAME}_g_idx": torch.full((64,), 9, dtype=torch.int32)}, "found 9 to 9"),
        ("int4 per channel", 60, {}, "within a 32-bit word"),
        ("int4 per channel", 100, {}, "within a 32-bit word"),
    ],
)
def test_groups_out_of_range_and_rows_that_end_within_a_word_are_refused_on_reading(
    scheme: str, columns: int, more: Stored, says: str, tmp_path: Path
) -> None:
    write, entry = compressed(**SCHEMES[scheme][0])
    stored, _ = write(NAME, noise(16, columns))
    save_folder(tmp_path, stored | more, {"quantization_config": entry})
    with open_model(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=says):
        checkpoint.tensors.read(NAME)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_rotated_and_sparse_weights_are_refused(entry: dict[str, Any], says: str, tmp_path: Path) -> None:
    write, own = compressed(**SCHEMES["fp8 per channel"][0])
    stored, _ = write(NAME, noise(16, 64))
    save_folder(tmp_path, stored, {"quantization_config": own | entry})
    with pytest.raises(CheckpointError, match=says):
        open_tensors(tmp_path)


@pytest.mark.parametrize("entry", [{"quant_method": "quark"}, {"quant_algo": "NVFP4"}, {"bits": 4}])
def test_unknown_schemes_stay_as_they_are_stored(entry: dict[str, Any], tmp_path: Path) -> None:
    stored, _ = fp8_blocks(NAME, noise(130, 140))
    save_folder(tmp_path, stored, {"quantization_config": entry})
    with open_model(tmp_path) as checkpoint:
        assert checkpoint.specs[NAME].dtype == "float8_e4m3fn"
        assert checkpoint.config == {"quantization_config": entry}


def test_float8_without_scales_is_not_cast(tmp_path: Path) -> None:
    codes = noise(4, 4).to(torch.float8_e4m3fn)
    with open_model(save_folder(tmp_path, {NAME: codes})) as checkpoint:
        assert checkpoint.specs[NAME].dtype == "float8_e4m3fn"
        assert not isinstance(checkpoint.tensors, QuantizedTensors)
