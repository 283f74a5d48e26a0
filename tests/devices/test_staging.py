"""The way of bytes to a device: order, reading ahead, slots that are used again, errors, and no wait without end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from actmat.engine.devices.device import SLOTS, SimulatedDevice
from actmat.engine.devices.ledger import Ledger
from actmat.engine.devices.staging import Staging, Transfer
from actmat.errors import CheckpointError

BLOCK = 256
"""Bytes of a block in these tests."""


class Source:
    """Stored entries, and what was read of them."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, fails_at: int = -1) -> None:
        self.stored = torch.arange(numel).to(dtype)
        self.reads: list[int] = []
        self.readers: set[str] = set()
        self.fails_at = fails_at
        self.transfer = Transfer(numel, dtype, self.read)

    def read(self, start: int, out: memoryview) -> None:
        if start == self.fails_at:
            raise CheckpointError("the file ended early")
        self.reads.append(start)
        self.readers.add(threading.current_thread().name)
        width = self.stored.itemsize
        out[:] = memoryview(self.stored.numpy()).cast("B")[start * width : start * width + len(out)]


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice("cpu:0", 1 << 20)
    device.block_bytes = BLOCK
    return device


@pytest.fixture
def staging(device: SimulatedDevice) -> Iterator[Staging]:
    with Staging(device) as staging:
        yield staging


def collected(staging: Staging, source: Source) -> Tensor:
    blocks = [(b.start, b.there.clone()) for b in staging.blocks(source.transfer)]
    assert [start for start, _ in blocks] == [*range(0, source.stored.numel(), BLOCK // source.stored.itemsize)]
    return torch.cat([there for _, there in blocks])


def wait_until(condition: threading.Condition, what: object) -> None:
    with condition:
        assert condition.wait_for(what, 5), "the reader does not come so far"  # type: ignore[arg-type]


def is_ahead(staging: Staging, source: Source, blocks: int) -> None:
    """Wait until so many blocks were read ahead."""
    wait_until(staging._change, lambda: len(source.transfer.ready) == blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
def test_bytes_arrive_in_order_with_and_without_a_thread(device: SimulatedDevice, dtype: torch.dtype) -> None:
    source = Source(1000, dtype)
    assert torch.equal(collected(Staging(device), source), source.stored)
    with Staging(device) as staging:
        for announced in (True, False):
            source = Source(1000, dtype)
            staging.announce([source.transfer] if announced else [])
            if announced:
                is_ahead(staging, source, SLOTS)
            assert torch.equal(collected(staging, source), source.stored)
            assert all("reader" in name for name in source.readers) == announced
            assert source.reads == sorted(set(source.reads)), "each block once, in order"


def test_the_thread_stops_when_all_slots_wait(staging: Staging) -> None:
    sources = [Source(BLOCK // 4 * 6) for _ in range(3)]
    staging.announce(s.transfer for s in sources)
    is_ahead(staging, sources[1], SLOTS - 6)
    assert [len(s.reads) for s in sources] == [6, SLOTS - 6, 0], "no more slots than there are"
    for source in sources:
        assert torch.equal(collected(staging, source), source.stored)


def test_a_transfer_that_comes_out_of_turn_is_read_by_who_wants_it(staging: Staging) -> None:
    """The slots are full of bytes that nobody takes: what is wanted must not wait for them."""
    first, second, last = Source(10_000), Source(10_000), Source(10_000)
    staging.announce([first.transfer, second.transfer, last.transfer])
    is_ahead(staging, first, SLOTS)
    assert torch.equal(collected(staging, last), last.stored)
    assert last.readers == {threading.current_thread().name}
    assert torch.equal(collected(staging, second), second.stored)
    assert torch.equal(collected(staging, first), first.stored)


def test_what_is_dropped_gives_its_slots_back(staging: Staging) -> None:
    unused, waiting, wanted = Source(10_000), Source(10_000), Source(BLOCK // 4 * SLOTS)
    staging.announce([unused.transfer, waiting.transfer, wanted.transfer])
    is_ahead(staging, unused, SLOTS)
    staging.drop([unused.transfer, waiting.transfer])
    assert not unused.transfer.reading
    assert not waiting.reads
    is_ahead(staging, wanted, SLOTS)
    assert torch.equal(collected(staging, wanted), wanted.stored)
    assert len(unused.reads) <= SLOTS + 1, "nothing of it is read after that"


@pytest.mark.parametrize("announced", [True, False])
def test_an_error_of_reading_is_raised_where_the_bytes_are_wanted(staging: Staging, *, announced: bool) -> None:
    broken, fine = Source(300, fails_at=128), Source(300)
    staging.announce([broken.transfer, fine.transfer] if announced else [])
    with pytest.raises(CheckpointError, match="ended early"):
        collected(staging, broken)
    assert torch.equal(collected(staging, fine), fine.stored), "the way is open for others"
    assert len(staging._own) == 2


def test_an_error_of_the_caller_loses_no_slot(staging: Staging) -> None:
    for _ in range(2 * SLOTS):
        source = Source(1000)
        staging.announce([source.transfer])
        is_ahead(staging, source, SLOTS)
        blocks = staging.blocks(source.transfer)
        with pytest.raises(ZeroDivisionError):
            _ = next(blocks).start / 0
        blocks.close()  # as when the frame of the caller goes
        staging.drop([source.transfer])
    wait_until(staging._change, lambda: len(staging._free) == SLOTS)


def test_the_end_gives_all_memory_back(device: SimulatedDevice) -> None:
    with Staging(device) as staging:
        assert device.ledger.used == device.staging_bytes == (SLOTS + 2) * BLOCK
        staging.announce([Source(10_000).transfer])
    gc.collect()
    assert device.ledger.used == 0
    assert not any("reader" in t.name for t in threading.enumerate())


# The ledger


def test_views_and_results_in_place_cost_nothing() -> None:
    ledger = Ledger("cpu:0", 10_000)
    host = torch.ones(1000)
    with ledger.counting():
        _ = host[:500].view(2, 250).mT
        host.mul_(2)
        assert ledger.used == 0, "memory of the host"
        kept = host + 1
        assert ledger.used == 4000
        part = kept[:1]
        del kept
        assert ledger.used == 4000, "a view keeps the whole"
        del part
        assert ledger.used == 0
        values, vectors = torch.linalg.eigh(torch.eye(10))
        assert ledger.used == 4 * (values.numel() + vectors.numel())
    assert ledger.peak >= 4000


def test_above_the_bound_nothing_is_kept() -> None:
    ledger = Ledger("cpu:0", 10_000)
    with ledger.counting():
        kept = torch.zeros(2000)
        with pytest.raises(torch.OutOfMemoryError, match=r"cpu:0 is out of memory: .* 8 kB of 10 kB are in use"):
            torch.zeros(1000)
        assert ledger.used == 8000
        del kept
        assert torch.zeros(2500).numel() == 2500, "up to the bound"
    assert torch.zeros(10_000).numel() == 10_000, "not counted outside"


def test_threads_share_a_ledger_and_count_only_their_own_work() -> None:
    ledger, kept = Ledger("cpu:0", 1 << 20), []

    def work() -> None:
        with ledger.counting():
            kept.append(torch.zeros(100))
        kept.append(torch.zeros(100))

    with ledger.counting():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ledger.used == 4 * 400
