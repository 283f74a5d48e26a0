"""Distributed checkpoints (DCP) for tests: cut by hand in one process, and saved by two processes.

python -m tests.helpers.distributed tests/data/dcp/two_ranks
"""

import dataclasses
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]


def save_dcp(state: Mapping[str, Any], folder: Path, *, files: int = 1, cut: Mapping[str, Boxes] | None = None) -> Path:
    """Save a state dict with torch's writer; tensors of `cut` (by flat name) in these boxes (offsets, sizes)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, thread_count=files)
        dcp.save(dict(state), storage_writer=writer, planner=_Cutter(cut or {}), no_dist=True)
    return folder


class _Cutter(dcp.DefaultSavePlanner):
    """Saves boxes of tensors as so many ranks would."""

    def __init__(self, cut: Mapping[str, Boxes]) -> None:
        super().__init__()
        self._cut = cut

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _parts(self, item: WriteItem) -> list[WriteItem]:
        if item.index.fqn not in self._cut:
            return [item]
        out = []
        for offsets, sizes in self._cut[item.index.fqn]:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            out.append(WriteItem(MetadataIndex(item.index.fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return out

    def resolve_data(self, item: WriteItem) -> Any:
        if item.index.fqn not in self._cut:
            return super().resolve_data(item)
        tensor = self.state_dict[item.index.fqn]
        chunk = item.tensor_data.chunk
        return tensor[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]


def halves(shape: Sequence[int], axis: int) -> Boxes:
    """Boxes of two ranks that share an axis, the first the larger half."""
    middle = -(-shape[axis] // 2)
    out = []
    for low, high in ((0, middle), (middle, shape[axis])):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = low, high - low
        if high > low:
            out.append((offsets, sizes))
    return out


def example() -> dict[str, Tensor]:
    """Tensors that two ranks save: shared by rows, by columns, unevenly, and not at all."""
    draw = torch.Generator().manual_seed(0)
    return {
        "rows.weight": torch.randn(6, 4, generator=draw),
        "columns.weight": torch.randn(4, 6, generator=draw).bfloat16(),
        "uneven.weight": torch.randn(5, 3, generator=draw),
        "one_row.weight": torch.randn(1, 3, generator=draw),
        "replicated": torch.randn(3, generator=draw),
    }


AXES = {"rows.weight": 0, "columns.weight": 1, "uneven.weight": 0, "one_row.weight": 0}


def _rank(rank: int, folder: str, rendezvous: str) -> None:
    """One of two processes: shards of DTensors over gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(AXES[name]) if name in AXES else Replicate()])
        for name, tensor in example().items()
    }
    moments = {name: {"exp_avg": tensor * 0, "step": torch.tensor(3.0)} for name, tensor in model.items()}
    state = {"model": model, "optimizer": {"state": moments}, "step": 7}
    os.chdir(Path(folder).parent)
    dcp.save(state, checkpoint_id=Path(folder).name)  # torch records the place, which is thus the same everywhere
    dist.destroy_process_group()


def save_by_two(folder: Path) -> None:
    """Save `example()` under `model` by two processes, with state of an optimizer."""
    import torch.multiprocessing as processes

    rendezvous = folder.parent / f".{folder.name}.{os.getpid()}"
    processes.spawn(_rank, args=(str(folder), str(rendezvous)), nprocs=2)
    rendezvous.unlink(missing_ok=True)


if __name__ == "__main__":
    save_by_two(Path(sys.argv[1]).resolve())
