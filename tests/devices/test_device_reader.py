"""Deltas for a device: formed on the host, in memory of the device, with the bits of the host."""

import math

import pytest
import torch
from tests.helpers.one_tensor import VECTOR, OneTensor, digest
from torch import Tensor

from actmat.planning.regions import CHUNK, Region

DEVICE = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [900, CHUNK + 777])
def test_deltas_are_those_of_the_host(dtype: torch.dtype, numel: int) -> None:
    base, *experts = (random(t, numel, dtype=dtype) for t in range(3))
    there, here = OneTensor(base, *experts, device=DEVICE), OneTensor(base, *experts)
    for mine, theirs in zip(there.read(), here.read(), strict=True):
        assert torch.equal(mine, theirs)
    assert there.reader.hashes() == here.reader.hashes() == (digest(base), tuple(map(digest, experts)))


def test_what_is_not_asked_for_is_hashed_all_the_same() -> None:
    base, *experts = (random(t, 100, dtype=torch.float32) for t in range(3))
    one = OneTensor(base, *experts, device=DEVICE)
    assert torch.equal(one.first_part()[1], experts[1] - base)
    assert one.reader.hashes() == (digest(base), tuple(map(digest, experts)))


@pytest.mark.parametrize("strategy", ["each", "held"])
def test_values_that_are_not_finite_are_cleared_and_found(strategy: str) -> None:
    base, expert = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, math.nan, 2.0])
    one = OneTensor(base, expert, device=DEVICE, tolerated=True)
    assert [d.tolist() for d in one.first_part(strategy)] == [[0.0, 0.0, 1.0]]  # type: ignore[arg-type]
    assert dict(one.findings.nonfinite) == {("w", "expert 'e0'"): 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_with_the_base_are_those_of_the_host(dtype: torch.dtype) -> None:
    numel = CHUNK + 777
    base, delta = random(0, numel, dtype=dtype), random(1, numel, dtype=torch.float32)
    region = Region(0, numel, (numel,), VECTOR)
    found = []
    for device in (DEVICE, None):
        reader = OneTensor(base, base, device=device).reader
        raw = reader.read_base(region)
        assert torch.equal(reader.converted_base(region, raw), base.float())
        found.append(torch.cat([c.clone() for c in reader.merged_chunks(region, raw, delta, 0.3)]))
    assert torch.equal(*found)
