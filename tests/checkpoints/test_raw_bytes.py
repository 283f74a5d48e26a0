"""Views of a tensor's memory outlive the name of the tensor."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actmat.checkpoints.raw import copy_range, raw_bytes


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


class CountingCopies(TorchDispatchMode):
    """Entries that torch's operations copy or allocate copies for."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "copy" in str(func) or "clone" in str(func):
            self.entries += out.numel()
        return out


@pytest.mark.parametrize(
    "shape", [(1, 300, 200), (3, 100, 200), (2, 3, 1, 100, 100), (60000,), (1, 1, 60000), (60000, 1)]
)
@pytest.mark.parametrize("chunk", [4096, 4099])
def test_reading_in_chunks_copies_each_entry_once(shape: tuple[int, ...], chunk: int) -> None:
    """Whatever the order of the axes in memory, and wherever a chunk ends: no time grows with chunks times size."""
    whole = torch.arange(60000.0).reshape(shape)
    axes = tuple(reversed(range(len(shape))))
    tensors: list[Tensor] = [whole.permute(axes).contiguous().permute(axes), torch.stack([whole, whole], -1)[..., 0]]
    for tensor in tensors:
        out = bytearray(whole.numel() * 4)
        with CountingCopies() as copies:
            for start in range(0, len(out), chunk):
                copy_range(tensor, start, memoryview(out)[start : start + chunk])
        assert bytes(out) == bytes(raw_bytes(whole))
        assert copies.entries <= 1.01 * whole.numel()
