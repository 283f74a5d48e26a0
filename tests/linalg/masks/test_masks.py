"""Masks by size, at random and by thresholds over streams, against naive forms."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.masking import awkward_deltas, naive_top
from tests.helpers.spectra import seeded
from torch import Tensor

from actmat.extras.research import della
from actmat.extras.research.breadcrumbs import Band
from actmat.extras.research.della import normalized_ranks
from actmat.extras.research.drop import Drop
from actmat.extras.research.sce import Where
from actmat.linalg import chunks
from actmat.linalg.masks import threshold
from actmat.linalg.masks.mask import (
    KEEP_ALL,
    Mask,
    Trim,
    l1_factors,
    top_trims,
)
from actmat.linalg.masks.threshold import Cut, StreamedCut, kth_magnitudes

# Masks keep what they promise: exact counts for the ranked ones, the right law for the random ones.


def apply(mask: Mask, flat: Tensor) -> Tensor:
    out = torch.full_like(flat, math.nan)
    for start, chunk in chunks.chunks_of(flat):
        mask.apply(chunk, start, out[start : start + chunk.numel()])
    return out


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_ENTRIES", 6)
    monkeypatch.setattr(della, "CHUNK_ENTRIES", 6)
    monkeypatch.setattr(threshold, "CHUNK_ENTRIES", 6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_trim_equals_sorting_at_every_rank(exact: bool, dtype: torch.dtype) -> None:
    """The deltas have a dozen entries per magnitude, so that nearly every rank cuts through equal ones."""
    (flat,) = awkward_deltas(1, 41, dtype=dtype)
    for k in range(-1, 43):
        (((trim, _),),) = top_trims([flat], [[k]], exact=exact)
        assert torch.equal(apply(trim, flat), naive_top(flat, max(k, 0), exact=exact)), k


def test_trim_keeps_subnormal_neighbors_apart() -> None:
    step = 2.0**-149
    flat = torch.tensor([step, 2 * step, -3 * step])
    (((trim, _),),) = top_trims([flat], [[2]], exact=True)
    assert apply(trim, flat).tolist() == [0.0, 2 * step, -3 * step]


def test_trim_lets_nan_through() -> None:
    """A NaN in an expert must show in the result, not vanish as a small entry."""
    assert math.isnan(apply(Trim.at(2.0, torch.float32), torch.tensor([math.nan, 1.0]))[0])


@pytest.mark.usefixtures("small_chunks")
def test_band_keeps_the_ranks_between() -> None:
    (flat,) = awkward_deltas(1, 41)
    for bottom, top in [(0, 0), (5, 0), (20, 3), (40, 40), (41, 20), (41, 0)]:
        (((low, _), (high, _)),) = top_trims([flat], [[bottom, top]], exact=True)
        expected = naive_top(flat, bottom, exact=True) - naive_top(flat, top, exact=True)
        assert torch.equal(apply(Band(low, high), flat), expected)


def test_where_masks_by_the_score_of_another_tensor() -> None:
    score = torch.tensor([3.0, 0.0, 1.0, 2.0])
    (((trim, _),),) = top_trims([score], [[2]], exact=True)
    assert apply(Where(score, trim), torch.tensor([-1.0, 5.0, 6.0, 7.0])).tolist() == [-1.0, 0.0, 0.0, 7.0]


@pytest.mark.parametrize("size", [1, 3, 8, 64, 1000])
def test_drop_is_the_same_for_any_chunk_size_and_when_repeated(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.randn(1001, generator=seeded(0))
    whole = apply(Drop(0.3, 5), flat)
    mask = Drop(0.3, 5)
    monkeypatch.setattr(chunks, "CHUNK_ENTRIES", size)
    assert torch.equal(apply(mask, flat), whole)
    assert torch.equal(apply(mask, flat), whole)
    assert not torch.equal(apply(Drop(0.3, 6), flat), whole)


def test_drop_does_not_depend_on_the_values_or_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    one = apply(Drop(0.5, 1), torch.ones(300_000))
    try:
        torch.set_num_threads(2)
        two = apply(Drop(0.5, 1), torch.full((300_000,), 3.0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one * 3, two)


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 0.9])
def test_drop_treats_all_entries_of_a_draw_alike_and_apart(density: float) -> None:
    n = 800_000
    kept_N8 = apply(Drop(density, 4), torch.ones(n)).view(-1, 8).double()
    error = math.sqrt(density * (1 - density) / (n / 8))
    assert float((kept_N8.mean(0) - density).abs().max()) < 4 * error
    pairs_88 = torch.corrcoef(kept_N8.mT) - torch.eye(8)
    assert float(pairs_88.abs().max()) < 4.5 / math.sqrt(n / 8), "28 pairs"


@pytest.mark.parametrize(("density", "rare"), [
    (3e-6, "kept"), (1.5e-5, "kept"), (2e-3, "kept"), (1.99 / 256, "kept"), (1 - 4e-6, "dropped"),
    (1 - 3.9e-3, "dropped"),
])  # fmt: skip
def test_drop_is_exact_where_a_byte_is_too_coarse(density: float, rare: str) -> None:
    n, seeds = 1_000_000, 40
    kept = sum(int(apply(Drop(density, seed), torch.ones(n)).sum()) for seed in range(0, 2 * seeds, 2))
    found = kept if rare == "kept" else n * seeds - kept
    expected = n * seeds * min(density, 1 - density)
    assert abs(found - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(("density", "kept"), [(0.0, 0), (1.0, 1000)])
def test_drop_at_the_ends_of_the_range(density: float, kept: int) -> None:
    assert int(apply(Drop(density, 3), torch.ones(1000)).sum()) == kept


def test_l1_factor_restores_the_norm() -> None:
    flat = torch.randn(1000, generator=seeded(1))
    (factor,) = l1_factors([flat], [Drop(0.3, 2)])
    assert float((factor * apply(Drop(0.3, 2), flat)).abs().sum()) == pytest.approx(float(flat.abs().sum()), rel=1e-6)
    assert l1_factors([torch.zeros(4)], [KEEP_ALL]) == [1.0]


def test_ranks_are_by_row_with_ties_in_storage_order() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert (normalized_ranks(scores) * 4).tolist() == [[4, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    assert normalized_ranks(torch.ones(3, 1)).tolist() == [[0.5]] * 3


# Selection by histograms of float bits equals selection by sorting, bit for bit.


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
            return selection.cut, rounds


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
    assert kth_magnitudes([flat], [ranks])[0] == [by_sorting(flat, k) for k in ranks]


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
    assert kth_magnitudes([flat], [[k]])[0] == [by_sorting(flat, k)]
    assert streamed([flat[:cut], flat[cut:]], k)[0] == by_sorting(flat, k)


def test_neighboring_float64_values_are_told_apart() -> None:
    """All four digits matter: values that differ in the last bit only."""
    flat = torch.empty(5, dtype=torch.float64)
    flat[0] = 1 / 3
    for i in range(1, 5):
        flat[i] = torch.nextafter(flat[i - 1], torch.tensor(1.0, dtype=torch.float64))
    assert [c.value for c in kth_magnitudes([flat], [[1, 2, 3, 4]])[0]] == flat.flip(0)[:4].tolist()


@pytest.mark.parametrize(("dtype", "rounds"), list(zip(DTYPES, [1, 1, 2, 4], strict=True)), ids=str)
def test_a_stream_needs_one_round_per_sixteen_bits(dtype: torch.dtype, rounds: int) -> None:
    flat = torch.randn(100, generator=seeded(2)).to(dtype)
    assert streamed(list(flat.split(13)), 31) == (by_sorting(flat, 31), rounds)


def test_pieces_of_several_workers_have_one_dtype() -> None:
    selection = StreamedCut(partial(min, 1))
    fork = selection.fork()
    selection.observe(torch.ones(2))
    fork.observe(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs one dtype"):
        selection.join(fork)


@pytest.mark.parametrize("k", [-3, 0])
def test_rank_zero_keeps_nothing(k: int) -> None:
    flat = torch.tensor([1.0, 2.0])
    assert kth_magnitudes([flat], [[k]])[0] == [Cut(math.inf, 0, 0, 0, 2)]
    assert streamed([flat], k) == (Cut(math.inf, 0, 0, 0, 2), 1)


@pytest.mark.parametrize("k", [2, 9])
def test_full_rank_keeps_all(k: int) -> None:
    flat = torch.tensor([1.0, 2.0])
    assert kth_magnitudes([flat], [[k]])[0] == [Cut(0.0, 2, 2, 0, 2)]
    assert kth_magnitudes([flat], [[k]])[0][0].fraction == 1
    assert streamed([flat], k) == (Cut(0.0, 2, 2, 0, 2), 1)


def test_empty_input() -> None:
    assert kth_magnitudes([torch.empty(0)], [[1]])[0] == [Cut(0.0, 0, 0, 0, 0)]
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
    assert kth_magnitudes([matrix[:, 2]], [[7]])[0] == [by_sorting(matrix[:, 2], 7)]


def test_nan_ranks_above_infinity() -> None:
    flat = torch.tensor([1.0, -math.inf, math.nan, 3.0])
    first, second = kth_magnitudes([flat], [[1, 2]])[0]
    assert math.isnan(first.value)
    assert second.value == math.inf


def test_a_stream_of_two_dtypes_is_refused() -> None:
    selection = StreamedCut(lambda total: 1)
    selection.observe(torch.ones(2))
    with pytest.raises(ValueError, match=r"one dtype: expected torch\.float32, got torch\.float64"):
        selection.observe(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mostly_zero_delta(dtype: torch.dtype) -> None:
    """A gentle fine-tuning in a 16-bit format leaves most entries where they were; the zeros are never gathered."""
    flat = torch.zeros(300_000, dtype=dtype)
    flat[::10] = torch.randn(30_000, generator=seeded(5)).to(dtype)
    assert kth_magnitudes([flat], [[29_000, 100_000]])[0] == [by_sorting(flat, 29_000), by_sorting(flat, 100_000)]
