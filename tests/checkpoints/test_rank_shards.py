"""Parts of ranks in safetensors: saved by two processes with torch's own writer, cut by hand, and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.distributed import example, halves
from tests.tolerances import BF16_ROUNDING, relative_error
from torch import Tensor

import actmat
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint, open_handle
from actmat.errors import CheckpointError
from actmat.extras.conformance.checkpoints import CheckpointConformance
from actmat.extras.training.dcp.ranks import RankShardsCheckpoint

TWO_RANKS = Path(__file__).parents[1] / "data/dcp/two_ranks_hf"


def cut(tensors: Mapping[str, Tensor], folder: Path, axis: int) -> Path:
    """Files of two ranks, which share every tensor along an axis, counted from its last where it is negative."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}, {}]
    offsets: list[dict[str, Any]] = [{}, {}]
    for name, tensor in tensors.items():
        boxes = halves(tensor.shape, axis % tensor.ndim) if tensor.numel() > 1 else [([0] * tensor.ndim, tensor.shape)]
        for rank, (begin, size) in enumerate(boxes):
            where = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            parts[rank][name] = tensor[where].contiguous()
            offsets[rank][name] = {"saved_offsets": list(begin)}
    for rank in (0, 1):
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets[rank]), "DCP_VERSION": "1.0"}
        save_file(parts[rank], folder / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata)
    return folder


class TestRankShardsCutByRows(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        return open_checkpoint(cut(tensors, folder, 0))


class TestRankShardsCutByTheLastAxis(CheckpointConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Checkpoint:
        return open_checkpoint(cut(tensors, folder, -1))


def test_what_two_processes_saved_is_read() -> None:
    wanted = example()
    with open_checkpoint(TWO_RANKS) as found, open_handle(found.handle()) as again:
        assert isinstance(found, RankShardsCheckpoint)
        assert found.specs.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found.read(name), tensor), name
            assert torch.equal(again.read(name), tensor), name
        assert "files of 2 ranks" in found.notes[0]


def test_shards_of_ranks_are_averaged(tmp_path: Path) -> None:
    first, second = ({n: t + k for n, t in example().items()} for k in (0, 1))
    places = [cut(t, tmp_path / f"step-{k}", 0) for k, t in enumerate((first, second))]
    report = actmat.average(places, out=tmp_path / "out", threads=1, durable=False)
    with open_checkpoint(report.out) as found:
        for name, tensor in example().items():
            assert relative_error(found.read(name), tensor.double() + 0.5) < BF16_ROUNDING, name


@pytest.mark.parametrize("which", ["gap", "rank", "twice", "offsets", "dtype", "text"])
def test_parts_that_do_not_fit_are_named(which: str, tmp_path: Path) -> None:
    folder = cut(example(), tmp_path / "a", 0)
    one, two = sorted(folder.iterdir())
    says = {
        "gap": "do not make up the shape", "rank": "found none of rank 2", "twice": "each entry once",
        "offsets": "has no offsets", "dtype": "other dtypes", "text": "expected a JSON object",
    }[which]  # fmt: skip
    if which == "gap":
        one.unlink()
        two.rename(one)
    elif which == "rank":
        two.rename(folder / "shard-00003-model-00001-of-00001.safetensors")
    elif which == "twice":
        shutil.copy(one, two)
    else:
        dtype = torch.float64 if which == "dtype" else torch.float32
        entry = "[" if which == "text" else json.dumps({"rows.weight": {"saved_offsets": [3, 0]}})
        tensors = {"rows.weight": torch.ones(3, 4, dtype=dtype)} | ({"b": torch.ones(2)} if which == "offsets" else {})
        save_file(tensors, two, {"DCP_SHARDING_INFO": entry})
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(folder)
