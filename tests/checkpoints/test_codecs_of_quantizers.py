"""GPTQ, AWQ and bitsandbytes against naive transcriptions of their layouts, and bitsandbytes where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.test_codecs import NAME, noise, same_everywhere
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.quantized import Stored
from torch import Tensor

from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError

STEM = NAME.removesuffix(".weight")
OUT, IN, GROUP = 32, 64, 16


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def packed_along(codes: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned codes along an axis, entry `order[k]` of a word at bits `k * bits`; entry by entry."""
    per_word = 32 // bits
    rows = codes.t() if axis == 0 else codes
    words = torch.zeros(rows.shape[0], rows.shape[1] // per_word, dtype=torch.int64)
    for r in range(rows.shape[0]):
        for w in range(words.shape[1]):
            for k in range(per_word):
                column = w * per_word + (k if order is None else order[k])
                words[r, w] |= int(rows[r, column]) << (bits * k)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return (words.t() if axis == 0 else words).contiguous()


def coded(bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, zero points, scales of the inputs' groups, and the weight that they stand for."""
    codes, zeros = whole(1 << bits, IN, OUT), whole(1 << bits, IN // GROUP, OUT, seed=1)
    scales = (whole(100, IN // GROUP, OUT, seed=2) + 1).to(torch.float16) / 512
    expected = torch.empty(OUT, IN, dtype=torch.float64)
    for o in range(OUT):
        for i in range(IN):
            g = int(groups[i])
            expected[o, i] = scales[g, o].double() * (int(codes[i, o]) - int(zeros[g, o]))
    return codes, zeros, scales, expected.to(torch.float16)


def gptq(bits: int, *, ordered: bool, shift: int) -> tuple[Stored, Tensor]:
    groups = torch.arange(IN) // GROUP
    if ordered:
        groups = groups[torch.randperm(IN, generator=torch.Generator().manual_seed(3))]
    codes, zeros, scales, expected = coded(bits, groups)
    stored = {
        f"{STEM}.qweight": packed_along(codes, bits, 0),
        f"{STEM}.qzeros": packed_along((zeros - shift) % (1 << bits), bits, 1),
        f"{STEM}.scales": scales,
        f"{STEM}.g_idx": groups.to(torch.int32),
    }
    return stored, expected


def awq() -> tuple[Stored, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales, expected = coded(4, torch.arange(IN) // GROUP)
    stored = {
        f"{STEM}.qweight": packed_along(codes, 4, 1, order),
        f"{STEM}.qzeros": packed_along(zeros, 4, 1, order),
        f"{STEM}.scales": scales,
    }
    return stored, expected


def config_of(method: str, **entry: Any) -> dict[str, Any]:
    return {"dtype": "float16", "quantization_config": {"quant_method": method, "group_size": GROUP} | entry}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_is_its_formula(bits: int, ordered: bool, tmp_path: Path) -> None:
    stored, expected = gptq(bits, ordered=ordered, shift=1)
    with open_model(save_folder(tmp_path, stored, config_of("gptq", bits=bits))) as checkpoint:
        assert list(checkpoint.specs) == [NAME]
        assert f"GPTQ int{bits}" in checkpoint.tensors.parts(NAME)[1]
        same_everywhere(checkpoint.tensors, NAME, expected)
        assert checkpoint.tensors.coded[NAME].held_bytes >= stored[f"{STEM}.qweight"].nbytes


def test_awq_is_its_formula(tmp_path: Path) -> None:
    stored, expected = awq()
    with open_model(save_folder(tmp_path, stored, config_of("awq", bits=4, version="GEMM"))) as checkpoint:
        assert "AWQ int4" in checkpoint.tensors.parts(NAME)[1]
        same_everywhere(checkpoint.tensors, NAME, expected)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of("gptq", bits=3), "codes of 3 bits"),
        (config_of("gptq", bits=8), "do not match 32 inputs"),
        (config_of("awq", bits=4), "do not match"),
    ],
)
def test_layouts_that_are_not_read_are_named(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    stored, _ = gptq(4, ordered=False, shift=1)
    with pytest.raises(CheckpointError, match=says):
        open_tensors(save_folder(tmp_path, stored, config))


def four_bits(weight: Tensor, *, nested: bool) -> tuple[Stored, Tensor]:
    """NF4-like codes of a table, blocks of 32, float64."""
    table, block, outer = torch.linspace(-1, 1, 16), 32, 4
    flat = weight.reshape(-1)
    codes = whole(16, flat.numel())
    scales = flat.float().abs().view(-1, block).amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored: Stored = {f"{NAME}.quant_map": table}
    if nested:
        table2, codes2 = torch.linspace(-1, 1, 256), whole(256, scales.numel(), seed=4).to(torch.uint8)
        absmax2 = torch.rand(-(-scales.numel() // outer), generator=torch.Generator().manual_seed(1))
        stored |= {f"{NAME}.absmax": codes2, f"{NAME}.nested_absmax": absmax2, f"{NAME}.nested_quant_map": table2}
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = table2[codes2.long()] * absmax2.repeat_interleave(outer)[: scales.numel()] + 0.25
    else:
        stored[f"{NAME}.absmax"] = scales
    expected = table[codes] * scales.repeat_interleave(block)
    pairs = codes.view(-1, 2).to(torch.uint8)
    text = json.dumps(state).encode()
    stored |= {
        NAME: (pairs[:, 0] << 4 | pairs[:, 1]).view(-1, 1),
        f"{NAME}.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    return stored, expected.view(weight.shape).to(torch.bfloat16)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(12, 32), (6, 48), (5, 64)])
def test_four_bits_are_their_formula(nested: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    stored, expected = four_bits(noise(*shape), nested=nested)
    with open_model(save_folder(tmp_path, stored, config_of("bitsandbytes"))) as checkpoint:
        assert list(checkpoint.specs) == [NAME]
        assert checkpoint.tensors.parts(NAME)[1].startswith("NF4")
        same_everywhere(checkpoint.tensors, NAME, expected)


def test_eight_bits_are_their_formula(tmp_path: Path) -> None:
    codes, largest = whole(255, OUT, IN).sub(127).to(torch.int8), torch.linspace(0.1, 2, OUT)
    expected = (codes.double() * largest.double()[:, None] / 127).to(torch.float16)
    stored = {NAME: codes, f"{STEM}.SCB": largest, f"{STEM}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    with open_model(save_folder(tmp_path, stored, config_of("bitsandbytes"))) as checkpoint:
        same_everywhere(checkpoint.tensors, NAME, expected)
    stored[f"{STEM}.weight_format"] += 1
    with pytest.raises(CheckpointError, match="GPU kernel"):
        open_tensors(save_folder(tmp_path, stored, config_of("bitsandbytes")))


@pytest.mark.parametrize("state", [b"{", b"[" * 5000, b'{"shape": [-1], "blocksize": 1, "dtype": "bfloat16"}',
                                   b'{"shape": [9, 9], "blocksize": 4, "dtype": "bfloat16"}'])  # fmt: skip
def test_damaged_states_are_refused(state: bytes, tmp_path: Path) -> None:
    stored, _ = four_bits(noise(12, 32), nested=False)
    stored[f"{NAME}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=NAME):
        open_tensors(save_folder(tmp_path, stored, config_of("bitsandbytes")))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_reads_the_same(kind: str, nested: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes").functional
    weight = noise(96, 320)
    codes, state = library.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    expected = library.dequantize_4bit(codes, state)
    packed = {f"{NAME}.{n}": t for n, t in state.as_dict(packed=True).items()}
    with open_model(save_folder(tmp_path, {NAME: codes} | packed, config_of("bitsandbytes"))) as checkpoint:
        found = checkpoint.tensors.read(NAME)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)  # of FP4, the library gives some zeros a sign
