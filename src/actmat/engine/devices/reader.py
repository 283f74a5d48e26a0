"""Read one tensor of the base and of all experts into the memory of a device: raw bytes go up, deltas are formed there.

    delta = widened(expert) - widened(base),   in the order of the host's path, so with the same bits

Half of the traffic of deltas in float32 for checkpoints in bfloat16. Bytes are hashed on the host on their way. A delta
with NaN or Inf, as rare as a broken checkpoint, is read again on the host, which finds and clears the entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.devices.device import Mark
from actmat.engine.devices.staging import Staging, Transfer
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Scratch
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.planning.model import Item
from actmat.planning.regions import Region


class DeviceReader(TensorReader):
    """As `TensorReader`; deltas, results and the base that methods are given lie on a device.

    Args:
        item, inputs, compute_dtype, scratch, findings: see `TensorReader`.
        staging: the way to the device.
    """

    def __init__(
        self,
        item: Item,
        inputs: Inputs,
        compute_dtype: torch.dtype,
        staging: Staging,
        scratch: Scratch,
        findings: Findings,
    ) -> None:
        super().__init__(item, inputs, compute_dtype, staging.device.torch_device, scratch, findings)
        self._staging = staging
        self._expected: dict[tuple[int, int], Transfer] = {}
        self._base_there = torch.empty(0, dtype=self._base_dtype)
        self._base_start = 0

    @property
    def chunkable(self) -> bool:
        """False: a chunk is too small for a device."""
        return False

    @property
    def on_host(self) -> bool:
        """False."""
        return False

    def computing(self) -> AbstractContextManager[None]:
        """See `Device.computing`."""
        return self._staging.device.computing()

    def transfers(self, regions: Sequence[Region]) -> Iterator[Transfer]:
        """The transfers of these regions, base and experts in turn."""
        for region in regions:
            for k in range(len(self._stored)):
                if k == 0 or self._sources[k - 1].kind == "stored":
                    yield self._transfer(k, region)

    def _transfer(self, k: int, region: Region) -> Transfer:
        """Entries of a region of the base (`k = 0`) or of expert `k - 1`."""
        key = k, region.start
        if key not in self._expected:
            dtype = self._base_dtype if k == 0 else torch_dtype(self._sources[k - 1].dtype)

            def read(start: int, out: memoryview) -> None:
                self.read_stored(k, (region.start + start) * dtype.itemsize, out)

            self._expected[key] = Transfer(region.numel, dtype, read)
        return self._expected[key]

    def read_base(self, region: Region) -> Tensor:
        """See `TensorReader`; the same entries stay on the device."""
        self.scratch.room.restart()
        raw = self.scratch.room.take(region.numel, self._base_dtype)
        self._base_there = self._staging.device.empty(0, self._base_dtype)  # gives the last region's back
        self._base_there = self._staging.device.empty(region.numel, self._base_dtype)
        self._base_start = region.start
        for block in self._staging.blocks(self._transfer(0, region)):
            here = slice(block.start, block.start + block.there.numel())
            self._base_there[here].copy_(block.there)
            raw[here].copy_(block.host)
        self._expected.pop((0, region.start))
        return raw

    def load(
        self, t: int, region: Region, base_raw: Tensor | StreamedBase, into: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """See `TensorReader`."""
        source, device = self._sources[t], self._staging.device
        if source.kind != "stored":
            formed = self.inputs.experts[t].delta(source.name, region.start, region.stop, self.compute_dtype)
            return self._sent(formed.reshape(-1)).view(region.shape), source.kind == "formed"
        delta = device.empty(region.numel, self.compute_dtype) if into is None else into
        for block in self._staging.blocks(self._transfer(t + 1, region)):
            here = slice(block.start, block.start + block.there.numel())
            with self.computing():
                delta[here].copy_(block.there).sub_(self._base_there[here].to(self.compute_dtype))
        self._expected.pop((t + 1, region.start))
        with self.computing():
            finite, changed = torch.stack([delta.sum().isfinite(), delta.any()]).tolist()
        if not finite:
            host = torch.empty(region.numel, dtype=self.compute_dtype)
            on_host, changed = self._load_on_host(t, region, base_raw, host)
            delta.copy_(on_host)
        else:
            self._checked[t] = region.stop
        return delta.view(region.shape), bool(changed)

    def _load_on_host(
        self, t: int, region: Region, base_raw: Tensor | StreamedBase, into: Tensor
    ) -> tuple[Tensor, bool]:
        """`TensorReader.load`, flat."""
        self.device = torch.device("cpu")
        try:
            delta, changed = super().load(t, region, base_raw, into)
        finally:
            self.device = self._staging.device.torch_device
        return delta.reshape(-1), changed

    def _sent(self, host: Tensor) -> Tensor:
        """A copy on the device."""
        return self._staging.device.empty(host.numel(), host.dtype).copy_(host)

    def buffer(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        return self._staging.device.empty(region.numel, self.compute_dtype)

    def passing_buffer(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        return self.buffer(region)

    def result(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        return self.buffer(region).view(region.shape)

    def converted_base(self, region: Region, base_raw: Tensor) -> Tensor:
        """See `TensorReader`; a base that is not the one that was read last, as that of a pool, is sent."""
        there = self._base_of(region) if region.stop <= self._base_start + self._base_there.numel() else None
        if there is None or there.numel() != base_raw.numel():
            there = self._sent(base_raw.reshape(-1))
        with self.computing():
            return there.to(self.compute_dtype).view(region.shape)

    def _base_of(self, region: Region) -> Tensor:
        return self._base_there[region.start - self._base_start : region.stop - self._base_start]

    def merged_chunks(
        self, region: Region, base_raw: Tensor | StreamedBase, delta: Tensor, scale: float, out_dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """See `TensorReader`; added and cast on the device, one block comes down while the next is computed."""
        device, base_there, delta = self._staging.device, self._base_of(region), delta.to(self.device)
        size = min(device.out_entries, region.numel)
        hosts = [device.host_buffer(size * out_dtype.itemsize) for _ in range(2)]

        def begin(low: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Mark]:
            here = slice(low, min(low + size, region.numel))
            with self.computing():
                merged = torch.add(base_there[here].to(self.compute_dtype), delta[here], alpha=scale)
                cast = merged.to(out_dtype)
                finite = cast.sum().isfinite()
            host = hosts[low // size % 2][: cast.numel() * cast.itemsize].view(out_dtype)
            return merged, cast, finite, host, device.fetch(cast, host)

        def end(merged: Tensor, cast: Tensor, finite: Tensor, host: Tensor, fetched: Mark) -> Tensor:
            fetched.synchronize()  # until then the cast must live: its memory would be given to the next
            return host if bool(finite) else merged.cpu()  # the caller casts again, and says what is out of range

        before = None
        for low in range(0, region.numel, size):
            begun = begin(low)
            if before is not None:
                yield end(*before)
            before = begun
        if before is not None:
            yield end(*before)

    def hashes(self) -> tuple[str, tuple[str, ...]]:
        """See `TensorReader`."""
        self.close()
        return super().hashes()

    def close(self) -> None:
        """Forget what was to be read ahead and was not used, and the base."""
        self._staging.drop(self._expected.values())
        self._expected = {}
        self._base_there = self._staging.device.empty(0, self._base_dtype)
