"""Every kind of tensors in storage against the shipped conformance suite."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.hub import hub_stand_in
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec
from actmat.checkpoints.composed import Composed, Piece
from actmat.checkpoints.memory import MemoryTensors, tensor_specs
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_tensors
from actmat.extras.conformance.tensors import TensorsConformance
from actmat.extras.vocabulary.rows import TokenRows, joined_runs


class TestSingleSafetensorsFile(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_file(dict(tensors), folder / "model.safetensors")
        return open_tensors(folder)


class TestTablesOfOtherRows(TensorsConformance):
    """Rows stored backwards in two files, and taken in order from both in turn."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        turned = {n: t.flip(0).contiguous() if t.ndim else t for n, t in tensors.items()}
        for name in ("own", "other"):
            save_file(turned, folder / f"{name}.safetensors")
        sources = [open_tensors(folder / f"{name}.safetensors") for name in ("own", "other")]
        height = next((t.shape[0] for t in tensors.values() if t.ndim), 1)
        tables = {n: (n, n) for n, t in tensors.items() if t.shape[:1] == (height,)}
        rows = joined_runs(((r % 2, height - 1 - r),) for r in range(height))
        others = {n: t for n, t in tensors.items() if n not in tables}
        save_file({**turned, **others}, folder / "own.safetensors")
        sources[0].close()
        sources[0] = open_tensors(folder / "own.safetensors")
        return TokenRows([sources[0], *sources], tables, rows)


class TestShardedSafetensors(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_sharded(tensors, folder, shards=min(3, len(tensors)))
        return open_tensors(folder)


class TestTorchFile(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
        return open_tensors(folder)


class TestLegacyTorchFile(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        torch.save(dict(tensors), folder / "weights.pt", _use_new_zipfile_serialization=False)
        return open_tensors(folder / "weights.pt")


class TestTransposedTorchFile(TensorsConformance):
    """Matrices stored column by column must come out row by row."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
        torch.save(turned, folder / "pytorch_model.bin")
        return open_tensors(folder)


class TestPermutedTorchFile(TensorsConformance):
    """Axes in reverse order in memory, whatever their number and size."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        def turned(tensor: Tensor) -> Tensor:
            axes = tuple(reversed(range(tensor.ndim)))
            return tensor.permute(axes).contiguous().permute(axes)

        torch.save({n: turned(t) for n, t in tensors.items()}, folder / "pytorch_model.bin")
        return open_tensors(folder)


def negated(tensor: Tensor) -> Tensor:
    """The same values as a lazily negated tensor, where its dtype has one: the memory holds the other sign."""
    return torch._neg_view(-tensor) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


class TestNegatedTorchFile(TensorsConformance):
    """What `torch.save` stores with the sign as a flag, such as the imaginary part of a conjugated tensor."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        torch.save({n: negated(t) for n, t in tensors.items()}, folder / "pytorch_model.bin")
        return open_tensors(folder)


class TestNegatedMemory(TensorsConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        return MemoryTensors({n: negated(t) for n, t in tensors.items()})


class TestMemory(TensorsConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        return MemoryTensors(tensors)


class TestStridedMemory(TensorsConformance):
    has_handle = False

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        return MemoryTensors({n: torch.stack([t, t], dim=-1)[..., 0] for n, t in tensors.items()})


class TestHub(TensorsConformance):
    @pytest.fixture(autouse=True)
    def _hub(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
        with hub_stand_in(monkeypatch, tmp_path_factory.mktemp("cache")) as self.hub:
            yield

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_sharded(tensors, folder, shards=min(2, len(tensors)))
        self.hub.add("org/model", folder)
        return open_tensors("org/model")


class TestComposed(TensorsConformance):
    """Tensors cut in two files, renamed, and put together with bytes that are stored nowhere."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        raw = {name: bytes(raw_bytes(tensor.contiguous())) for name, tensor in tensors.items()}
        for part in range(2):
            halves = {
                f"{name}.{part}": torch.tensor(list(data[part::2]), dtype=torch.uint8) for name, data in raw.items()
            }
            save_file(halves, folder / f"{part}.safetensors")
        sources = [open_tensors(folder / f"{part}.safetensors") for part in range(2)]
        pieces = {
            name: tuple(
                data[k : k + 1] if k % 5 == 3 else Piece(k % 2, f"{name}.{k % 2}", k // 2, k // 2 + 1)
                for k in range(len(data))
            )
            for name, data in raw.items()
        }
        specs = tensor_specs(tensors, "both", location="")
        return Composed(sources, pieces, specs, location="whole")


def test_the_suite_catches_tensors_that_ignore_where_a_range_begins(tmp_path: Path) -> None:
    class FromTheStart(MemoryTensors):
        def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
            super().fill(spec, 0, out)

    class Suite(TensorsConformance):
        def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
            return FromTheStart(tensors)

    with pytest.raises(AssertionError, match="bytes at 3 \\+ 50 differ"):
        Suite().test_read_into_fills_any_range(tmp_path)
