"""Selection by histograms of float bits equals selection by sorting, bit for bit."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import seeded
from torch import Tensor

from actmat.linalg import chunks
from actmat.linalg.masks import threshold
from actmat.linalg.masks.threshold import Cut, StreamedCut, kth_magnitudes

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def by_sorting(flat: Tensor, k: int) -> Cut:
    magnitudes = flat.abs()
    value = magnitudes.sort(descending=True).values[k - 1]
    above, equal = int((magnitudes > value).sum()), int((magnitudes == value).sum())
    return Cut(float(value), k, above, equal, flat.numel())


def streamed(parts: list[Tensor], k: int) -> tuple[Cut, int]:
    selection, rounds = StreamedCut(lambda total: k), 0
    while True:
        for part in parts:
            selection.observe(part)
        rounds += 1
        if not selection.advance():
            assert selection.cut is not None
            return selection.cut, rounds


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ENTRIES", 7)
    monkeypatch.setattr(threshold, "CHUNK_ENTRIES", 7)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_equals_sorting(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    special = torch.tensor(
        [0.0, -0.0, smallest, -smallest, smallest / 4, -smallest / 2, torch.finfo(dtype).max, 1.0, -1.0, 1.0],
        dtype=torch.float64,
    ).to(dtype)
    flat = torch.cat([special, torch.randn(60, generator=seeded(1)).to(dtype)])
    ranks = list(range(1, flat.numel()))
    assert kth_magnitudes(flat, ranks) == [by_sorting(flat, k) for k in ranks]


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=40),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_values_at_any_rank_equal_sorting(values: list[float], data: st.DataObject, dtype: torch.dtype) -> None:
    flat = torch.tensor(values, dtype=torch.float64).to(dtype)
    k = data.draw(st.integers(1, len(values) - 1))
    cut = data.draw(st.integers(0, len(values)))
    assert kth_magnitudes(flat, [k]) == [by_sorting(flat, k)]
    assert streamed([flat[:cut], flat[cut:]], k)[0] == by_sorting(flat, k)


def test_neighboring_float64_values_are_told_apart() -> None:
    """All four digits matter: values that differ in the last bit only."""
    flat = torch.empty(5, dtype=torch.float64)
    flat[0] = 1 / 3
    for i in range(1, 5):
        flat[i] = torch.nextafter(flat[i - 1], torch.tensor(1.0, dtype=torch.float64))
    assert [c.value for c in kth_magnitudes(flat, [1, 2, 3, 4])] == flat.flip(0)[:4].tolist()


@pytest.mark.parametrize(("dtype", "rounds"), list(zip(DTYPES, [1, 1, 2, 4], strict=True)), ids=str)
def test_a_stream_needs_one_round_per_sixteen_bits(dtype: torch.dtype, rounds: int) -> None:
    flat = torch.randn(100, generator=seeded(2)).to(dtype)
    assert streamed(list(flat.split(13)), 31) == (by_sorting(flat, 31), rounds)


def test_the_order_of_pieces_and_workers_change_nothing() -> None:
    parts = [torch.randn(50, generator=seeded(i)) for i in range(16)]
    expected = by_sorting(torch.cat(parts), 100)
    assert streamed(parts[::-1], 100)[0] == expected
    selection = StreamedCut(partial(min, 100))
    again = True
    while again:
        selection.observe(parts[0])
        with ThreadPoolExecutor(4) as pool:
            forks = list(
                pool.map(observed, [pickle.dumps(selection.fork())] * 4, [parts[k + 1 :: 4] for k in range(4)])
            )
        for fork in forks[::-1]:
            selection.join(pickle.loads(fork))
        again = selection.advance()
    assert selection.cut == expected


def test_pieces_of_several_workers_have_one_dtype() -> None:
    selection = StreamedCut(partial(min, 1))
    fork = selection.fork()
    selection.observe(torch.ones(2))
    fork.observe(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs one dtype"):
        selection.join(fork)


def observed(selection: bytes, parts: list[torch.Tensor]) -> bytes:
    """The pickled selection after it observed the parts."""
    fork = pickle.loads(selection)
    for part in parts:
        fork.observe(part)
    return pickle.dumps(fork)


@pytest.mark.parametrize("k", [-3, 0])
def test_rank_zero_keeps_nothing(k: int) -> None:
    flat = torch.tensor([1.0, 2.0])
    assert kth_magnitudes(flat, [k]) == [Cut(math.inf, 0, 0, 0, 2)]
    assert streamed([flat], k) == (Cut(math.inf, 0, 0, 0, 2), 1)


@pytest.mark.parametrize("k", [2, 9])
def test_full_rank_keeps_all(k: int) -> None:
    flat = torch.tensor([1.0, 2.0])
    assert kth_magnitudes(flat, [k]) == [Cut(0.0, 2, 2, 0, 2)]
    assert kth_magnitudes(flat, [k])[0].fraction == 1
    assert streamed([flat], k) == (Cut(0.0, 2, 2, 0, 2), 1)


def test_empty_input() -> None:
    assert kth_magnitudes(torch.empty(0), [1]) == [Cut(0.0, 0, 0, 0, 0)]
    assert StreamedCut(lambda total: total // 2).advance() is False


def test_a_finished_selection_ignores_the_rounds_of_others() -> None:
    for k in (0, 1):
        selection, flat = StreamedCut(lambda total, k=k: k), torch.tensor([1.0, -4.0, 2.0])
        while True:
            selection.observe(flat)
            if not selection.advance():
                break
        found = selection.cut
        selection.observe(flat * 9)
        assert not selection.advance()
        assert selection.cut == found


def test_strided_input_is_read_through_its_strides() -> None:
    matrix = torch.randn(30, 8, generator=seeded(3))
    assert kth_magnitudes(matrix[:, 2], [7]) == [by_sorting(matrix[:, 2], 7)]


def test_nan_ranks_above_infinity() -> None:
    flat = torch.tensor([1.0, -math.inf, math.nan, 3.0])
    first, second = kth_magnitudes(flat, [1, 2])
    assert math.isnan(first.value)
    assert second.value == math.inf


def test_a_stream_of_two_dtypes_is_refused() -> None:
    selection = StreamedCut(lambda total: 1)
    selection.observe(torch.ones(2))
    with pytest.raises(ValueError, match=r"one dtype: expected torch\.float32, got torch\.float64"):
        selection.observe(torch.ones(2, dtype=torch.float64))


def test_the_input_is_left_as_it_is() -> None:
    flat = torch.randn(40, generator=seeded(4))
    copy = flat.clone()
    kth_magnitudes(flat, [3, 9])
    streamed([flat], 3)
    assert torch.equal(flat, copy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mostly_zero_delta(dtype: torch.dtype) -> None:
    """A gentle fine-tuning in a 16-bit format leaves most entries where they were; the zeros are never gathered."""
    flat = torch.zeros(300_000, dtype=dtype)
    flat[::10] = torch.randn(30_000, generator=seeded(5)).to(dtype)
    assert kth_magnitudes(flat, [29_000, 100_000]) == [by_sorting(flat, 29_000), by_sorting(flat, 100_000)]
