"""Places of several deltas: each once, together, whatever hands them over; and room for what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import random_deltas
from torch import Tensor

from actmat.linalg import places
from actmat.linalg.election import elect, masked_sum
from actmat.linalg.masks import Drop
from actmat.linalg.places import PLACE, empty_result, walk
from actmat.linalg.threshold import true_indices


class OneBuffer(list[Tensor]):
    """Deltas that come through one buffer per expert, overwritten at every place, as an engine reads them."""

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        buffers = [torch.empty(16) for _ in self]
        for start in range(0, self[0].numel(), 16):
            size = min(16, self[0].numel() - start)
            yield start, [b[:size].copy_(d.flatten()[start : start + size]) for b, d in zip(buffers, self, strict=True)]

    def result(self) -> Tensor:
        return torch.full(self[0].shape, float("nan"))


@pytest.mark.parametrize("size", [0, 1, 11, 12, 25])
def test_places_cover_all_deltas_in_step(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PLACE", 12)
    first, second = torch.arange(float(size)), -torch.arange(float(size))
    found = [(start, [p.clone() for p in pieces]) for start, pieces in walk([first, second])]
    assert [start for start, _ in found] == list(range(0, size, 12))
    for expected, t in ((first, 0), (second, 1)):
        assert torch.equal(torch.cat([pieces[t] for _, pieces in found] or [expected]), expected)


def test_a_place_is_a_whole_number_of_draws() -> None:
    """`Drop` draws four entries at a time."""
    assert PLACE % 4 == 0


def test_deltas_of_any_strides_are_walked_in_storage_order_of_the_result() -> None:
    delta = torch.arange(6.0).reshape(2, 3).mT
    ((_, [piece]),) = walk([delta])
    assert piece.tolist() == delta.flatten().tolist()
    result = empty_result([delta])
    assert result.is_contiguous()
    assert result.shape == delta.shape


@pytest.mark.parametrize("density", [0.3, 0.8])
def test_streamed_deltas_give_the_bits_of_held_ones(density: float) -> None:
    deltas = [d.float() for d in random_deltas(3, 7, 13)]
    streamed = OneBuffer(deltas)
    for scales in ([1.0, 1.0, 1.0], [0.5, -2.0, 3.0]):
        masks = [Drop(density, t) for t in range(3)]
        assert torch.equal(masked_sum(streamed, masks, scales), masked_sum(deltas, masks, scales))
        found = elect(streamed, masks, scales=scales, counts=[1.0] * 3)
        assert torch.equal(found, elect(deltas, masks, scales=scales, counts=[1.0] * 3))


@settings(max_examples=60, deadline=None)
@given(flags=st.lists(st.booleans(), max_size=40))
def test_true_indices_are_those_of_nonzero(flags: list[bool]) -> None:
    assert true_indices(torch.tensor(flags, dtype=torch.bool)).tolist() == [i for i, f in enumerate(flags) if f]
