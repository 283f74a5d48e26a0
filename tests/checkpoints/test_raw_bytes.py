"""Views of a tensor's memory outlive the name of the tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from actmat.checkpoints.raw import raw_bytes


def test_a_view_keeps_its_tensor_alive() -> None:
    tensor = torch.arange(1000)
    watch = weakref.ref(tensor)
    view = raw_bytes(tensor)
    part = view[8:16]
    del tensor, view
    gc.collect()
    assert watch() is not None
    assert bytes(part) == (1).to_bytes(8, "little")
    del part
    gc.collect()
    assert watch() is None, "and lets it go with the last view"


def test_a_temporary_can_be_viewed() -> None:
    views = [raw_bytes(torch.full((4096,), i, dtype=torch.uint8)) for i in range(50)]
    assert [set(v) for v in views] == [{i} for i in range(50)]


def test_a_view_writes_through() -> None:
    tensor = torch.zeros(2, dtype=torch.int16)
    raw_bytes(tensor)[:] = b"\x01\x00\x02\x00"
    assert tensor.tolist() == [1, 2]
    assert len(raw_bytes(torch.empty(0, 3))) == 0


def test_other_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        raw_bytes(torch.zeros(3, 2).T)
