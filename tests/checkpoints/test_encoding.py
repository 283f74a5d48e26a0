"""Codes that are written: the library's own for the same weights, read back as their record says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.test_codecs import NAME, SCHEMES, noise
from tests.helpers.quantized import Stored, compressed, fp8_blocks, mxfp4, save_model
from torch import Tensor

from actmat.checkpoints.codecs.base import CodedTensor
from actmat.checkpoints.codecs.checkpoint import EncodingSink, coding_of, encoding_bytes
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_checkpoint


class Sink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> None:
        self.data += data

    @property
    def digest(self) -> str:
        content = ContentHash()
        content.update(self.data)
        return content.hexdigest()


def layout_of(stored: Stored, config: dict[str, Any], folder: Path, name: str = NAME) -> CodedTensor:
    with open_checkpoint(save_model(folder, stored, config)) as checkpoint:
        found = coding_of(checkpoint, name)
    assert found is not None
    return found


def written(coding: CodedTensor, values: Tensor, stored: Stored, step: int = 4096) -> tuple[Stored, EncodingSink]:
    """Encode values given in pieces of `step` bytes."""
    sinks = {part: Sink() for part in coding.parts}
    sink = EncodingSink(coding, sinks)
    data = raw_bytes(values.float().contiguous())
    for start in range(0, len(data), step):
        sink.write(data[start : start + step])
    found = {}
    for part, own in sinks.items():
        assert len(own.data) == stored[part].nbytes, part
        found[part] = torch.frombuffer(own.data, dtype=torch.uint8).view(stored[part].dtype).view(stored[part].shape)
    return found, sink


def checked(
    coding: CodedTensor, values: Tensor, found: Stored, sink: EncodingSink, config: Any, folder: Path
) -> Tensor:
    """What is read back; its hash and error are those of the sink."""
    with open_checkpoint(save_model(folder, found, config)) as checkpoint:
        read = checkpoint.read(coding.name)
    content = ContentHash()
    content.update(raw_bytes(read))
    assert content.hexdigest() == sink.digest
    error = (read.double() - values.double()).norm() / values.double().norm()
    assert sink.error == pytest.approx(float(error), rel=1e-6, abs=1e-12)
    assert set(sink.hashes) == set(coding.parts)
    return read


WRITTEN = [s for s in SCHEMES if s != "int8 with zero points"]


@pytest.mark.parametrize("scheme", WRITTEN)
def test_codes_are_those_of_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    write, entry = compressed(**SCHEMES[scheme][0])
    config = {"dtype": "float32", "quantization_config": entry}
    first, values = noise(48, 96, dtype=torch.float32), noise(48, 96, dtype=torch.float32).flip(0) * 1.7
    stored, _ = write(NAME, first)
    coding = layout_of(stored, config, tmp_path / "a")
    expected, read = write(NAME, values)
    found, sink = written(coding, values, stored, step=1000)
    again = checked(coding, values, found, sink, config, tmp_path / "b")
    for part, tensor in expected.items():
        if tensor.dtype.is_floating_point and tensor.itemsize > 1:
            assert torch.allclose(found[part], tensor, rtol=1e-6), part
    different = (again != read).float().mean()  # scales that differ in the last bit may move a tie
    assert different < 0.01 or torch.allclose(again, read, rtol=1e-6)


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (2, 140, 130)])
def test_fp8_blocks_are_those_of_transformers(shape: tuple[int, ...], tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    stored, _ = fp8_blocks(NAME, noise(*shape))
    values = noise(*shape).flip(-1)
    coding = layout_of(stored, config, tmp_path / "a")
    found, sink = written(coding, values, stored)
    checked(coding, values, found, sink, config, tmp_path / "b")
    expected, _ = fp8_blocks(NAME, values)
    assert torch.allclose(found[f"{NAME}_scale_inv"], expected[f"{NAME}_scale_inv"], rtol=1e-6)
    same = found[NAME].view(torch.uint8) == expected[NAME].view(torch.uint8)
    assert same.float().mean() > 0.99
    assert 0.005 < sink.error < 0.04


def test_mxfp4_that_is_written_again_is_the_same(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    stored, values = mxfp4(name, noise(2, 64, 24))
    coding = layout_of(stored, config, tmp_path / "a", name)
    found, sink = written(coding, values, stored)
    assert torch.equal(checked(coding, values, found, sink, config, tmp_path / "b"), values)
    assert sink.error == 0.0


def test_mxfp4_rounds_to_the_nearest_with_ties_to_even(tmp_path: Path) -> None:
    name = "experts.up"
    stored, _ = mxfp4(name, noise(1, 32, 1))
    coding = layout_of(stored, {"dtype": "float32"}, tmp_path, name)
    given = [4.0, 0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 3.5, 5.0, 5.1, 7.9, -0.25, -0.75, -5.1, 0.0]
    wanted = [4.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.0, -1.0, -6.0, 0.0]
    values = torch.tensor(given + [0.0] * 16).view(32, 1)
    found, sink = written(coding, values, stored)
    read = checked(coding, values.view(1, 32, 1), found, sink, {"dtype": "float32"}, tmp_path / "b")
    assert read.flatten()[:16].tolist() == wanted


@pytest.mark.parametrize("scheme", ["fp8 per channel", "int4 per group", "int4 with zero points", "fp8 per tensor"])
def test_rows_of_zeros_stay_zeros(scheme: str, tmp_path: Path) -> None:
    write, entry = compressed(**SCHEMES[scheme][0])
    config = {"dtype": "float32", "quantization_config": entry}
    stored, _ = write(NAME, noise(48, 96, dtype=torch.float32))
    coding = layout_of(stored, config, tmp_path / "a")
    values = torch.zeros(48, 96)
    found, sink = written(coding, values, stored)
    assert not checked_zero(coding, found, config, tmp_path / "b").any()
    assert sink.error == 0.0


def checked_zero(coding: CodedTensor, found: Stored, config: Any, folder: Path) -> Tensor:
    with open_checkpoint(save_model(folder, found, config)) as checkpoint:
        return checkpoint.read(coding.name)


def test_layouts_that_are_only_read_say_so(tmp_path: Path) -> None:
    write, entry = compressed(**SCHEMES["int8 with zero points"][0])
    stored, _ = write(NAME, noise(48, 96))
    coding = layout_of(stored, {"quantization_config": entry}, tmp_path)
    assert coding.granule == 0 == encoding_bytes(coding)
    assert "zero points" in coding.why_not_written
