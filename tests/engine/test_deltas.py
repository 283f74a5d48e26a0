"""Deltas as they are read: hashed, subtracted, checked; every byte once."""

import weakref

import pytest
import torch
from tests.helpers.one_tensor import VECTOR, OneTensor, digest
from torch import Tensor

from actmat.engine import deltas as deltas_module
from actmat.engine import reader as reader_module
from actmat.engine.deltas import RegionDeltas
from actmat.engine.reader import ItemReader
from actmat.linalg.chunks import Streamed
from actmat.planning import regions as regions_module
from actmat.planning.regions import cut

NAN, INF = float("nan"), float("inf")
on_host_and_device = pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["host", "device"])
"""Deltas are formed on the host in either case; for a device, in memory of the device."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 entries to read and of 4 to give, so that tensors of some dozen are read in several."""
    monkeypatch.setattr(deltas_module, "CHUNK_ENTRIES", 4)
    monkeypatch.setattr(deltas_module, "CHUNK", 5)
    monkeypatch.setattr(reader_module, "CHUNK", 5)
    monkeypatch.setattr(regions_module, "CHUNK", 5)


@on_host_and_device
@pytest.mark.parametrize("acts_on", ["tensor", "elementwise"])
@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                    (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)])  # fmt: skip
def test_deltas_and_hashes(
    acts_on: str, compute: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device | None
) -> None:
    torch.manual_seed(0)
    base = torch.randn(3, 4).to(dtypes[0])
    experts = [(base.double() + torch.randn(3, 4).double()).to(dtypes[1]) for _ in range(3)]
    setup = OneTensor(base, *experts, compute=compute, device=device)
    for delta, expert in zip(setup.read(acts_on), experts, strict=True):
        assert delta.dtype == compute
        assert torch.equal(delta, expert.to(compute) - base.to(compute))
    assert setup.reader.hashes() == (digest(base), tuple(map(digest, experts)))
    assert not setup.findings.problems()


def test_a_delta_is_read_once() -> None:
    setup = OneTensor(torch.zeros(4), torch.ones(4), torch.ones(4))
    region = cut((4,), VECTOR, "tensor")[0]
    deltas = RegionDeltas(setup.reader, region, setup.reader.read_base(region))
    assert len(deltas) == 2
    assert torch.equal(deltas[1], torch.ones(4))
    with pytest.raises(RuntimeError, match="declare one_pass=False"):
        deltas[1]
    with pytest.raises(IndexError):
        deltas[2]


@on_host_and_device
@pytest.mark.parametrize("acts_on", ["tensor", "elementwise"])
def test_what_is_not_finite_is_counted_by_its_owner(acts_on: str, device: torch.device | None) -> None:
    base = torch.zeros(12)
    first, second = torch.ones(12), torch.ones(12)
    first[1] = NAN
    second[1], second[7], second[11] = INF, -INF, NAN
    setup = OneTensor(base, first, second, device=device)
    deltas = setup.read(acts_on)
    assert setup.findings.problems() == [
        "tensor 'w' of expert 'e0' has 1 value that is NaN or Inf",
        "tensor 'w' of expert 'e1' has 3 values that are NaN or Inf",
    ]
    assert setup.findings.fatal
    assert [int((d == 0).sum()) for d in deltas] == [1, 3]


def test_an_infinity_that_everyone_shares_is_a_mask() -> None:
    base = torch.tensor([-INF, 0.0, NAN])
    setup = OneTensor(base, torch.tensor([-INF, 1.0, NAN]), torch.tensor([-INF, 2.0, NAN]))
    assert [d.tolist() for d in setup.read()] == [[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]
    assert setup.findings.problems() == []


def test_a_bad_base_is_blamed_once() -> None:
    setup = OneTensor(torch.tensor([NAN, 0.0]), torch.ones(2), torch.ones(2))
    assert [d.tolist() for d in setup.read()] == [[0.0, 1.0]] * 2
    assert setup.findings.problems() == ["tensor 'w' of the base has 1 value that is NaN or Inf"]


def test_walking_holding_and_reading_give_the_same_deltas_and_hashes() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, 7, generator=generator).bfloat16()
    experts = [base + torch.randn(3, 7, generator=generator).bfloat16(), base.clone()]
    expected = [e.float() - base.float() for e in experts]
    region = cut((3, 7), VECTOR, "tensor")[0]

    walked, held = OneTensor(base, *experts), OneTensor(base, *experts)
    assert walked.reader.item.is_chunkable
    streamed = RegionDeltas(walked.reader, region, walked.reader.read_base(region))
    places = [(start, [p.clone() for p in pieces]) for start, pieces in streamed.walk()]
    assert [start for start, _ in places] == [0, 4, 8, 12, 16, 20]
    for t, delta in enumerate(expected):
        assert torch.equal(torch.cat([pieces[t] for _, pieces in places]), delta.flatten())
    assert streamed.changed

    room = held.reader.scratch.room
    with room.opened(10_000, elsewhere=0):
        whole = RegionDeltas(held.reader, region, held.reader.read_base(region), "held")
        result = whole.result()
        result.fill_(7.0)
        for delta, found in zip(expected, whole, strict=True):
            assert torch.equal(found, delta), "apart from the room for the result"
    assert walked.reader.hashes() == held.reader.hashes()


def test_held_deltas_are_read_once_and_walked_over_often(monkeypatch: pytest.MonkeyPatch) -> None:
    base, good, bad = torch.ones(11), torch.arange(11.0), torch.arange(11.0)
    bad[6] = NAN
    setup = OneTensor(base, good, bad)
    asked: list[int] = []
    read = ItemReader.read_chunk

    def noted(self: ItemReader, t: int, start: int, base_raw: Tensor, out: Tensor) -> bool:
        asked.append(start)
        return read(self, t, start, base_raw, out)

    monkeypatch.setattr(ItemReader, "read_chunk", noted)
    held = setup.first_part("held")
    assert asked == [0, 0, 4, 4, 8, 8]
    assert isinstance(held, Streamed)
    expected = (bad - base).nan_to_num()
    first, second = ([[p.clone() for p in pieces] for _, pieces in held.walk()] for _ in range(2))
    for walked in (first, second):
        assert torch.equal(torch.cat([pieces[0] for pieces in walked]), good - base)
        assert torch.equal(torch.cat([pieces[1] for pieces in walked]), expected)
    assert torch.equal(held[1], expected)
    assert asked == [0, 0, 4, 4, 8, 8]
    assert (held.changed, setup.findings.nonfinite.total()) == (True, 1)
    assert setup.reader.hashes() == (digest(base), (digest(good), digest(bad)))


def test_a_second_walk_gives_the_same_deltas_and_tells_nothing_twice() -> None:
    base, good, bad = torch.ones(11), torch.arange(11.0), torch.arange(11.0)
    bad[6] = NAN
    setup = OneTensor(base, good, bad)
    deltas = setup.first_part()
    walks = [[[p.clone() for p in pieces] for _, pieces in deltas.walk()] for _ in range(3)]
    for walk in walks:
        assert torch.equal(torch.cat([pieces[0] for pieces in walk]), good - base)
        assert torch.cat([pieces[1] for pieces in walk])[6] == 0, "what is not finite is left out every time"
    assert setup.findings.nonfinite.total() == 1
    assert setup.reader.hashes() == (digest(base), (digest(good), digest(bad)))


@on_host_and_device
def test_what_a_rule_did_not_look_at_is_hashed_all_the_same(device: torch.device | None) -> None:
    base, one, two = torch.ones(11), torch.arange(11.0), torch.zeros(11)
    setup = OneTensor(base, one, two, device=device)
    deltas = setup.first_part()
    if device:
        assert torch.equal(deltas[1], two - base)
    else:
        next(deltas.walk())  # given up after a place
    assert setup.reader.hashes() == (digest(base), (digest(one), digest(two)))


def test_memory_of_deltas_in_turn_is_free_when_the_last_has_been_dropped() -> None:
    setup = OneTensor(torch.zeros(12), torch.ones(12), torch.full((12,), 2.0))
    region = cut((12,), VECTOR, "tensor")[0]
    deltas = RegionDeltas(setup.reader, region, setup.reader.read_base(region))
    memory = set()
    for delta in deltas:
        memory.add(delta.data_ptr())
        storage = weakref.ref(delta.untyped_storage())
    assert len(memory) == 1, "every delta lies in the memory of the one before"
    assert torch.equal(delta, torch.full((12,), 2.0))
    del delta
    assert storage() is None


def test_deltas_are_counted_from_the_end_as_in_any_sequence() -> None:
    one = OneTensor(torch.zeros(3), torch.ones(3), torch.full((3,), 2.0))
    deltas = one.first_part("held")
    assert torch.equal(deltas[-1], deltas[1])
    with pytest.raises(IndexError):
        deltas[2]
