"""Raw bytes are sent up and subtracted there: against float64, and with the findings of the host's path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.one_tensor import VECTOR, OneTensor, digest
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

from actmat.engine.deltas import Deltas
from actmat.engine.devices.device import Device, Mark, SimulatedDevice
from actmat.engine.devices.reader import DeviceReader
from actmat.engine.devices.staging import Staging
from actmat.planning.regions import CHUNK, Region, cut

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Watched(SimulatedDevice):
    """Keeps what is copied up and down."""

    def __init__(self) -> None:
        super().__init__("cpu:0", 1 << 28)
        self.sent: list[tuple[torch.dtype, int]] = []
        self.fetched: list[tuple[torch.dtype, int]] = []

    def send(self, host: Tensor, there: Tensor, after: Mark | None) -> Mark:
        """Note it."""
        self.sent.append((host.dtype, host.numel()))
        return super().send(host, there, after)

    def fetch(self, there: Tensor, host: Tensor) -> Mark:
        """Note it."""
        self.fetched.append((there.dtype, there.numel()))
        return super().fetch(there, host)


@pytest.fixture
def device() -> Watched:
    return Watched()


@pytest.fixture
def staging(device: Device) -> Iterator[Staging]:
    with Staging(device) as staging:
        yield staging


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deltas_are_those_of_float64_and_of_the_host(staging: Staging, device: Watched, dtype: torch.dtype) -> None:
    base, *experts = (random(t, 3, 900, dtype=dtype) for t in range(4))
    there = OneTensor(base, *experts, staging=staging)
    assert isinstance(there.reader, DeviceReader)
    found = there.read()
    assert device.sent == [(dtype, 2700)] * 4, "as they are stored, once each"
    for mine, theirs, expert in zip(found, OneTensor(base, *experts).read(), experts, strict=True):
        assert torch.equal(mine, theirs), "other bits than on the host"
        exact = expert.double() - base.double()
        assert float((mine.double() - exact).norm() / exact.norm()) < F32_ELEMENTWISE
    assert there.reader.hashes() == (digest(base), tuple(map(digest, experts)))
    assert device.ledger.used == device.staging_bytes


def test_mixed_dtypes_are_widened_each_from_its_own(staging: Staging, device: Watched) -> None:
    base, experts = random(0, 50, dtype=torch.float16), [random(t + 1, 50, dtype=d) for t, d in enumerate(DTYPES)]
    found = OneTensor(base, *experts, staging=staging).read()
    assert [d for d, _ in device.sent] == [torch.float16, *DTYPES]
    for mine, theirs in zip(found, OneTensor(base, *experts).read(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_of_several_blocks_is_read_ahead_in_order(staging: Staging) -> None:
    base, expert = (random(t, CHUNK + 12_345, dtype=torch.bfloat16) for t in range(2))
    one = OneTensor(base, expert, staging=staging)
    assert isinstance(one.reader, DeviceReader)
    staging.announce(one.reader.transfers(cut(one.item.shape, VECTOR, "tensor")))
    (found,) = one.read()
    assert torch.equal(found, expert.float() - base.float())
    assert one.reader.hashes() == (digest(base), (digest(expert),))


def test_what_is_not_asked_for_is_hashed_all_the_same(staging: Staging) -> None:
    base, *experts = (random(t, 100, dtype=torch.float32) for t in range(3))
    one = OneTensor(base, *experts, staging=staging)
    assert isinstance(one.reader, DeviceReader)
    staging.announce(one.reader.transfers(cut(one.item.shape, VECTOR, "tensor")))
    deltas = one.first_part()
    assert torch.equal(deltas[1], experts[1] - base)
    assert one.reader.hashes() == (digest(base), tuple(map(digest, experts)))


BROKEN: list[tuple[list[float], list[float]]] = [
    ([0.0, math.nan, 1.0], [0.0, 1.0, 1.0]),
    ([0.0, math.inf, 1.0], [math.inf, math.inf, 1.0]),
    ([math.nan, 2.0, 3.0], [math.nan, 2.0, 3.5]),
    ([3e38, 3e38, 1.0], [-3e38, -3e38, 1.0]),
    ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
    ([0.0, 0.0, 0.0], [-0.0, -0.0, -0.0]),
]


@pytest.mark.parametrize(("expert", "base"), BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_give_the_findings_of_the_host(
    staging: Staging, expert: list[float], base: list[float], dtype: torch.dtype
) -> None:
    """NaN, Inf, sums that overflow, the same bits in both, zeros of either sign."""
    given = torch.tensor(base).to(dtype), torch.tensor(expert).to(dtype), torch.tensor([1.0, 1, 1]).to(dtype)
    answers = []
    for settings in ({"staging": staging}, {}):
        settings: dict[str, Any]
        one = OneTensor(*given, tolerated=True, **settings)
        deltas = one.first_part()
        answers.append(([d.tolist() for d in deltas], deltas.changed, dict(one.findings.nonfinite)))
        assert not any(math.isnan(x) for d in answers[-1][0] for x in d)
    assert answers[0] == answers[1]


def region_of(numel: int) -> Region:
    return Region(0, numel, (numel,), VECTOR)


@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_with_the_base_are_cast_before_they_come_down(
    staging: Staging, device: Watched, scale: float, dtype: torch.dtype
) -> None:
    numel = CHUNK + 777
    base, delta = random(0, numel, dtype=dtype), random(1, numel, dtype=torch.float32)
    found, region = [], region_of(numel)
    for settings in ({"staging": staging}, {}):
        settings: dict[str, Any]
        reader = OneTensor(base, base, **settings).reader
        raw = reader.read_base(region)
        chunks = reader.merged_chunks(region, raw, delta, scale, torch.bfloat16)
        found.append(torch.cat([chunk.to(torch.bfloat16, copy=True) for chunk in chunks]))
    assert torch.equal(*found), "other bits than on the host"
    assert device.fetched == [(torch.bfloat16, CHUNK), (torch.bfloat16, 777)]
    exact = base.double() + scale * delta.double()
    assert float((found[0].double() - exact).norm() / exact.norm()) < 2**-8


def test_what_is_beyond_the_range_comes_down_uncast(staging: Staging) -> None:
    """The writer then names the value."""
    reader = OneTensor(torch.zeros(3, dtype=torch.float16), torch.zeros(3, dtype=torch.float16), staging=staging).reader
    raw = reader.read_base(region_of(3))
    (chunk,) = reader.merged_chunks(region_of(3), raw, torch.tensor([1.0, 7e4, 0.0]), 1.0, torch.float16)
    assert chunk.dtype == torch.float32
    assert chunk.tolist() == [1.0, 7e4, 0.0]


def test_memory_of_a_region_is_given_back(staging: Staging, device: Watched) -> None:
    one = OneTensor(*(random(t, 5000, dtype=torch.float32) for t in range(3)), staging=staging)
    region = region_of(5000)
    deltas = Deltas(one.reader, region, one.reader.read_base(region), "held")
    assert device.ledger.used == device.staging_bytes + 3 * 20_000
    deltas.release()
    assert device.ledger.used == device.staging_bytes + 20_000
    one.reader.close()
    assert device.ledger.used == device.staging_bytes
