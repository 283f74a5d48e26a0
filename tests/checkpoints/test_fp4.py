"""4-bit floats of compressed-tensors against that library, bit by bit, and what is refused of them."""

from pathlib import Path

import pytest
import torch
from tests.checkpoints.test_codecs import NAME, noise, same_everywhere
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.quantized import compressed_fp4

import actmat
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError

KINDS = {
    "NVFP4A16": "NVFP4, one fp8 scale per 16 columns",
    "NVFP4": "NVFP4, one fp8 scale per 16 columns",
    "MXFP4A16": "MXFP4, one power of two per 32 columns",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(48, 96), (3, 32), (600, 512)])
def test_compressed_tensors_reads_the_same(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    write, entry = compressed_fp4(kind)
    stored, expected = write(NAME, noise(*shape))
    save_folder(tmp_path, stored | {"norm.weight": torch.ones(3)}, {"dtype": "bfloat16", "quantization_config": entry})
    with open_model(tmp_path) as checkpoint:
        assert set(checkpoint.specs) == {NAME, "norm.weight"}
        assert checkpoint.tensors.parts(NAME)[1] == KINDS[kind]
        same_everywhere(checkpoint.tensors, NAME, expected)
        assert float((expected.double() - noise(*shape).double()).norm() / noise(*shape).double().norm()) < 0.15


@pytest.mark.parametrize("kind", ["NVFP4A16", "MXFP4A16"])
def test_a_merge_is_written_as_floats(kind: str, tmp_path: Path) -> None:
    write, entry = compressed_fp4(kind)
    config = {"dtype": "bfloat16", "quantization_config": entry}
    _, plain = write(NAME, noise(48, 96))
    base = save_folder(tmp_path / "base", write(NAME, noise(48, 96))[0], config)
    expert = save_folder(tmp_path / "expert", {NAME: plain * 2}, {"dtype": "bfloat16"})
    report = actmat.merge(base, [expert], method="linear", out=tmp_path / "out", threads=1, durable=False)
    with open_model(report.out) as found:
        assert torch.equal(found.tensors.read(NAME), plain * 2)
        assert found.config == {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale", None, "expected scales .* found none"),
        ("weight_scale", torch.ones(48, 6), "found float32"),
        ("weight_scale", torch.ones(48, 5).to(torch.float8_e4m3fn), "one scale per 16 of its 96 columns"),
        ("weight_global_scale", None, "expected one float32 .*_global_scale', found none"),
        ("weight_global_scale", torch.ones(2), "expected one float32 .*_global_scale', found"),
        ("weight_zero_point", torch.zeros(48, 6), "with zero points"),
        ("weight_scale", torch.ones(48, 3, dtype=torch.uint8), "together with power-of-two scales"),
    ],
)
def test_damaged_parts_are_named(part: str, value: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    write, entry = compressed_fp4("NVFP4A16")
    stored, _ = write(NAME, noise(48, 96))
    name = NAME.removesuffix("weight") + part
    stored = {n: t for n, t in stored.items() if n != name} | ({} if value is None else {name: value})
    with pytest.raises(CheckpointError, match=message):
        open_tensors(save_folder(tmp_path, stored, {"quantization_config": entry}))
