"""Runs on simulated devices, of tensors that are larger than the chunks of the host."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.samples import Samples
from tests.helpers.sessions import OpenedRun, opened_run

from actmat.checkpoints.base import TensorSpec
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.resources import Resources
from actmat.experts.deltas import DeltaSource
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.planning.item import Item, ItemCost, MethodCall, Reading, Target, Write
from actmat.planning.work import DeviceRoom, place
from actmat.recipe import make_recipe


def large(folder: Path, rows: int = 760, columns: int = 740, layers: int = 2) -> Samples:
    """A base and three experts in bfloat16; a method that streams on the host holds its deltas on a device."""

    rng = torch.Generator().manual_seed(0)
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(layers)]
    base = {n: torch.randn(rows, columns, generator=rng).bfloat16() for n in names}
    experts = [
        {n: (x.float() + 0.02 * torch.randn(x.shape, generator=rng)).bfloat16() for n, x in base.items()}
        for _ in range(3)
    ]
    first, *rest = (save_folder(folder / str(t), m, {"model_type": "llama"}) for t, m in enumerate((base, *experts)))
    return Samples(folder, first, tuple(rest))


def executor_of(
    run: OpenedRun,
    device: str = "cpu:0",
    *,
    threads: int = 1,
    memory: int = 1 << 33,
    device_memory: float = math.inf,
) -> ThreadExecutor:
    return ThreadExecutor(run.inputs, run.writers, Resources(threads, memory, device, device_memory))


def opened(samples: Samples, name: str, *variants: dict[str, Any]) -> contextlib.AbstractContextManager[OpenedRun]:
    folders = [samples.folder / name / str(p) for p in range(len(variants))]
    return opened_run([samples.recipe() | fields for fields in variants], folders, None, DeviceRoom("cpu:0"))


def plain(run: OpenedRun) -> Any:
    records = {key: dataclasses.replace(record, seconds=0.0) for key, record in run.records.items()}
    return run.files(), records, run.findings.problems()


LINEAR = TensorLayout(Role.LINEAR, "")


def placed(
    method: str, shape: tuple[int, ...], room: DeviceRoom, *, factored: bool = False
) -> tuple[Reading, ItemCost, str]:
    """Place of a tensor of three bfloat16 experts that a method merges in float32."""
    declared = get_method(method)
    source = DeltaSource("w", "stored", "bfloat16", 2 * math.prod(shape), rank=4 * factored)
    target = Target(TensorSpec("w", shape, "bfloat16", ""), LINEAR, sources=(source,) * 3)
    call = MethodCall(method, declared.resolve_options({}))
    reading = Reading("factors") if factored else None
    recipe = make_recipe({"base": "b", "experts": ["a", "b", "c"]})
    return place(Item(target, "merge", "", Write("sum"), call, reading), recipe, room)
