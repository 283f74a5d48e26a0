"""Checkpoints of codes against the shipped conformance suite: tensors that a layout can hold exactly are codes."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tests.helpers.checkpoint_files import save_folder
from torch import Tensor

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.resolve import open_tensors
from actmat.extras.conformance.tensors import TensorsConformance, conformance_tensors


class TestScaledCodes(TensorsConformance):
    """Every float32 tensor: a code of 1 per entry, and the entry as its scale."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        stored = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float32 and tensor.ndim and tensor.numel():
                stored[name] = torch.ones(tensor.shape).to(torch.float8_e4m3fn)
                stored[f"{name}_scale_inv"] = tensor
        entry = {"quant_method": "fp8", "weight_block_size": [1, 1]}
        return open_tensors(save_folder(folder, stored, {"dtype": "float32", "quantization_config": entry}))


class TestPackedCodes(TensorsConformance):
    """Matrices of zeros and ones in bfloat16: packed integers with a scale of 1."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        stored = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16 and tensor.ndim == 2:
                del stored[name]
                codes = tensor.to(torch.uint8) + 8
                stored[f"{name}_packed"] = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.int32)
                stored[f"{name}_scale"] = torch.ones(len(tensor), 1, dtype=torch.bfloat16)
                stored[f"{name}_shape"] = torch.tensor(tensor.shape)
        weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
        entry = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        return open_tensors(save_folder(folder, stored, {"dtype": "bfloat16", "quantization_config": entry}))


def test_conformance_meets_codes(tmp_path: Path) -> None:
    for suite, coded in ((TestScaledCodes(), 3), (TestPackedCodes(), 1)):
        with suite.store(conformance_tensors(), tmp_path / suite.__class__.__name__) as checkpoint:
            assert len(checkpoint.coded) >= coded
