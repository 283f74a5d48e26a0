"""Copies that end as late as they may: buffers are not used again too early, and memory lives until it was copied."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import torch
from tests.helpers.devices import executor_of, large, opened, plain
from torch import Tensor

from actmat.engine.devices.device import Mark, SimulatedDevice


class LateCopy:
    """A copy that is made when somebody waits for it, as a busy stream would make it."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = weakref.ref(source), weakref.ref(target)
        self._lock = threading.Lock()
        self.done = False

    def synchronize(self) -> None:
        """Make it, once."""
        with self._lock:
            if self.done:
                return
            source, target = self._source(), self._target()
            assert source is not None, "the source of a copy was given back before it was made"
            assert target is not None, "the target of a copy was given back before it was made"
            target.copy_(source)
            self.done = True


class LateDevice(SimulatedDevice):
    """Like a GPU whose streams lag behind."""

    def __init__(self) -> None:
        super().__init__("cpu:0", 256 << 20)
        self.copies: list[LateCopy] = []

    def send(self, host: Tensor, there: Tensor, after: Mark | None) -> Mark:
        """Promise to copy."""
        self.copies.append(LateCopy(host, there))
        return self.copies[-1]

    def fetch(self, there: Tensor, host: Tensor) -> Mark:
        """Promise to copy."""
        return self.send(there, host, None)

    def wait(self, mark: Mark) -> None:
        """Work that comes after a copy finds its bytes."""
        mark.synchronize()


@pytest.mark.parametrize("method", ["actmat", "ties"])
def test_late_copies_carry_the_right_bytes(tmp_path: Path, method: str) -> None:
    samples, device = large(tmp_path), LateDevice()
    with opened(samples, "expected", {"method": method}) as expected:
        expected.merge_here()
    with opened(samples, "out", {"method": method}) as found:
        found.take(executor_of(found, device).run(found.spec, found.units))
        assert plain(found) == plain(expected)
    assert len(device.copies) > 2 * 4
    assert all(copy.done for copy in device.copies)


def test_a_copy_without_its_source_is_noticed() -> None:
    target = torch.zeros(3)
    mark = LateDevice().fetch(torch.ones(3), target)
    with pytest.raises(AssertionError, match="source of a copy was given back"):
        mark.synchronize()
