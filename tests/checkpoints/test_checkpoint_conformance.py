"""Every kind of checkpoint against the shipped conformance suite."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.counting import CountingCheckpoint
from tests.helpers.hub import hub_stand_in
from torch import Tensor

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.extras.conformance.checkpoints import CheckpointConformance
from actmat.extras.vocabulary.rows import TokenRowsCheckpoint, joined_runs


class TestSingleSafetensorsFile(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        save_file(dict(tensors), folder / "model.safetensors")
        return open_checkpoint(folder)


class TestTablesOfOtherRows(CheckpointConformance):
    """Rows stored backwards in two files, and taken in order from both in turn."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        turned = {n: t.flip(0).contiguous() if t.ndim else t for n, t in tensors.items()}
        for name in ("own", "other"):
            save_file(turned, folder / f"{name}.safetensors")
        sources = [open_checkpoint(folder / f"{name}.safetensors") for name in ("own", "other")]
        height = next((t.shape[0] for t in tensors.values() if t.ndim), 1)
        tables = {n: (n, n) for n, t in tensors.items() if t.shape[:1] == (height,)}
        rows = joined_runs(((r % 2, height - 1 - r),) for r in range(height))
        others = {n: t for n, t in tensors.items() if n not in tables}
        save_file({**turned, **others}, folder / "own.safetensors")
        sources[0].close()
        sources[0] = open_checkpoint(folder / "own.safetensors")
        return TokenRowsCheckpoint(sources[0], sources, tables, rows, owned=True)


class TestShardedSafetensors(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        save_sharded(tensors, folder, shards=min(3, len(tensors)))
        return open_checkpoint(folder)


class TestTorchFile(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
        return open_checkpoint(folder)


class TestLegacyTorchFile(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        torch.save(dict(tensors), folder / "weights.pt", _use_new_zipfile_serialization=False)
        return open_checkpoint(folder / "weights.pt")


class TestTransposedTorchFile(CheckpointConformance):
    """Matrices stored column by column must come out row by row."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
        torch.save(turned, folder / "pytorch_model.bin")
        return open_checkpoint(folder)


class TestPermutedTorchFile(CheckpointConformance):
    """Axes in reverse order in memory, whatever their number and size."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        def turned(tensor: Tensor) -> Tensor:
            axes = tuple(reversed(range(tensor.ndim)))
            return tensor.permute(axes).contiguous().permute(axes)

        torch.save({n: turned(t) for n, t in tensors.items()}, folder / "pytorch_model.bin")
        return open_checkpoint(folder)


def negated(tensor: Tensor) -> Tensor:
    """The same values as a lazily negated tensor, where its dtype has one: the memory holds the other sign."""
    return torch._neg_view(-tensor) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


class TestNegatedTorchFile(CheckpointConformance):
    """What `torch.save` stores with the sign as a flag, such as the imaginary part of a conjugated tensor."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        torch.save({n: negated(t) for n, t in tensors.items()}, folder / "pytorch_model.bin")
        return open_checkpoint(folder)


class TestNegatedMemory(CheckpointConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        return MemoryCheckpoint({n: negated(t) for n, t in tensors.items()})


class TestMemory(CheckpointConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        return MemoryCheckpoint(tensors)


class TestStridedMemory(CheckpointConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        return MemoryCheckpoint({n: torch.stack([t, t], dim=-1)[..., 0] for n, t in tensors.items()})


class TestCounting(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        save_file(dict(tensors), folder / "model.safetensors")
        return CountingCheckpoint(open_checkpoint(folder))


class TestHub(CheckpointConformance):
    @pytest.fixture(autouse=True)
    def _hub(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
        with hub_stand_in(monkeypatch, tmp_path_factory.mktemp("cache")) as self.hub:
            yield

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        save_sharded(tensors, folder, shards=min(2, len(tensors)))
        self.hub.add("org/model", folder)
        return open_checkpoint("org/model")


def test_the_suite_catches_a_checkpoint_that_returns_its_own_memory(tmp_path: Path) -> None:
    class Leaky(MemoryCheckpoint):
        def read(self, name: str) -> Tensor:
            return self._tensor(name)

    class Suite(CheckpointConformance):
        def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
            return Leaky(tensors)

    with pytest.raises(AssertionError, match="shows up in the next read"):
        Suite().test_read_gives_memory_of_its_own(tmp_path)


def test_counting_tells_whole_chunked_partial_and_double_reads_apart() -> None:
    tensors = {name: torch.ones(10) for name in ("whole", "chunked", "partly", "twice", "never")}
    counting = CountingCheckpoint(MemoryCheckpoint({**tensors, "empty": torch.empty(0)}))
    counting.read("whole")
    for start in range(0, 40, 8):
        counting.read_into("chunked", start, memoryview(bytearray(8)))
    counting.read_into("partly", 0, memoryview(bytearray(20)))
    counting.read("twice")
    counting.read("twice")
    assert counting.read_other_than_once() == {"partly": 0.5, "twice": 2, "never": 0}
    assert counting.read_other_than_once(["whole", "chunked"]) == {}
    assert counting.calls["chunked"] == 5
