"""The running sum of one tensor, `total = sum_t w_t D_t`: continued from an earlier merge, kept, and finished.

Expert by expert in the recipe's order, in the compute dtype, before anything is divided or scaled. An expert at the end
therefore gives the same bits whether the sum before it was computed now or read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.apply import checked_finite
from actmat.engine.naming import named_errors
from actmat.engine.needs import Surroundings, needs_of
from actmat.engine.observer import Sink
from actmat.engine.reader import TensorReader
from actmat.engine.size import InputSample, size_of
from actmat.engine.task import Task
from actmat.errors import CheckpointError
from actmat.linalg.inner import one_pass_sum
from actmat.planning.regions import Region
from actmat.planning.sums import weights_of

__all__ = ["KeptRecord", "RunningSum"]


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """Part of a tensor's record that tells of its sum.

    Args:
        hashes: content hash of the sum and of the sampled one, by name in the output.
        unmoved: regions that no expert changed.
        size: see `engine.size`; of tensors that the method merged.
    """

    hashes: Mapping[str, str]
    unmoved: tuple[int, ...]
    size: Mapping[str, Any] | None


class RunningSum:
    """The sum of one task; regions come in storage order.

    Args:
        task: of an item with `sums`.
        reader: reads its tensor.
    """

    def __init__(self, task: Task, reader: TensorReader) -> None:
        self._task, self._reader = task, reader
        self._total_spec, self._sample_spec = task.item.sums
        self._sink: Sink | None = None
        self._seen = ContentHash()
        self._unmoved: list[int] = []
        self._regions = 0
        if reader.kept is not None:
            self._sample.total = self._read_sample()

    def merge(self, region: Region, deltas: Sequence[Tensor], around: Surroundings) -> Tensor:
        """Merged delta of one region, flat; its sum is written on the way.

        Raises:
            NumericalError, RecipeError: from the method, with the name of the tensor.
            CheckpointError: the sum that was kept cannot be read.
        """
        task, first = self._task, self._reader.known
        call, finish = task.call, task.method.finish_sum
        assert finish is not None, "the plan keeps sums of methods that have them"
        with named_errors(task.kind, task.item.name, call.method):
            weights = weights_of(call.weights, len(deltas))
            before = self._read(region) if first else None
            total = one_pass_sum((deltas[t] for t in range(first, len(deltas))), weights[first:], before)
            if self._sink is None:
                self._sink = task.writer.sink(self._total_spec.name)
            self._sink.write(raw_bytes(total.reshape(-1)))
            merged = finish(total, len(deltas), **needs_of(task, region, 0, region.label, around), **call.options)
            return checked_finite(merged.value.reshape(-1), task)

    def note_change(self, *, changed: bool) -> bool:
        """True if any expert changed the region that was merged last; `changed`: one of those that were read did."""
        kept = self._reader.kept
        changed = changed or (kept is not None and self._regions not in kept.unmoved)
        if not changed:
            self._unmoved.append(self._regions)
        self._regions += 1
        return changed

    def finish(self, base_hash: str) -> KeptRecord:
        """Write the sum of the sampled entries, once all regions are merged.

        Raises:
            CheckpointError: the sum that was continued is not as it was recorded, or the base is another.
        """
        task, kept = self._task, self._reader.kept
        assert self._sink is not None, "its regions were merged"
        if kept is not None:
            self._check(base_hash)
        sample = self._sample
        sample.finish()
        sink = task.writer.sink(self._sample_spec.name)
        sink.write(raw_bytes(sample.total))
        size = None
        if task.item.action == "merge":
            size = size_of(task.item, sample, task.merged_sample.entries, () if kept is None else kept.expert_norms)
        hashes = {self._total_spec.name: self._sink.digest, self._sample_spec.name: sink.digest}
        return KeptRecord(hashes, tuple(self._unmoved), size)

    def _read(self, region: Region) -> Tensor:
        """Entries of the sum that was kept."""
        total = torch.empty(region.numel, dtype=self._reader.compute_dtype)
        data = raw_bytes(total)
        self._stored.read_into(self._task.item.name, region.start * total.itemsize, data)
        self._seen.update(data)
        return total.view(region.shape)

    def _read_sample(self) -> Tensor:
        name = self._sample_spec.name.partition("/")[2]
        total = torch.empty(self._sample_spec.shape, dtype=torch.float64)
        data, seen = raw_bytes(total), ContentHash()
        self._stored.read_into(name, 0, data)
        seen.update(data)
        assert self._reader.kept is not None
        self._compare(seen.hexdigest(), self._reader.kept.hashes[1], f"the sampled sum of '{self._task.item.name}'")
        return total

    def _check(self, base_hash: str) -> None:
        kept, name = self._reader.kept, self._task.item.name
        assert kept is not None
        self._compare(self._seen.hexdigest(), kept.hashes[0], f"the sum of '{name}'")
        self._compare(base_hash, kept.base_hash, f"tensor '{name}' of the base")

    def _compare(self, found: str, recorded: str, what: str) -> None:
        if found == recorded:
            return
        inputs = self._reader.inputs
        assert inputs.kept is not None
        raise CheckpointError(
            f"{inputs.kept.location}: {what} has another content hash than its manifest records ({found[:12]}..., not "
            f"{recorded[:12]}...). Likely cause: a file was changed since that merge. Fix: merge all experts anew."
        )

    @property
    def _sample(self) -> InputSample:
        assert self._reader.sample is not None, "an item that a method merges has entries"
        return self._reader.sample

    @property
    def _stored(self) -> Any:
        assert self._reader.inputs.kept is not None
        return self._reader.inputs.kept.checkpoint
