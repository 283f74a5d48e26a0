"""Sums with the base for a device have the bits of those on the host; its deltas are in tests/engine/test_deltas.py."""

import pytest
import torch
from tests.helpers.one_tensor import VECTOR, OneTensor
from torch import Tensor

from actmat.planning.regions import CHUNK, Region


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_with_the_base_are_those_of_the_host(dtype: torch.dtype) -> None:
    numel = CHUNK + 777
    base, delta = random(0, numel, dtype=dtype), random(1, numel, dtype=torch.float32)
    region = Region(0, numel, (numel,), VECTOR)
    found = []
    for device in (torch.device("cpu"), None):
        reader = OneTensor(base, base, device=device).reader
        raw = reader.read_base(region)
        assert torch.equal(reader.converted_base(region, raw), base.float())
        found.append(torch.cat([c.clone() for c in reader.merged_chunks(region, raw, delta, 0.3)]))
    assert torch.equal(*found)
