"""Merge models that are open already (in memory, counting), and merge plain tensors on disk."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.helpers.counting import CountingTensors
from tests.helpers.sessions import started
from torch import Tensor

import actmat
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.resources import Resources
from actmat.experts.stored import StoredDeltas
from actmat.planning.statistics import ExpertStatistics
from actmat.recipe import make_recipe

Tensors = Mapping[str, Tensor]


def counted(tensors: Tensors, config: Mapping[str, Any] | None = None) -> Model:
    """A model of tensors in memory behind a counter."""
    model = hold_model(tensors, config=config)
    return dataclasses.replace(model, tensors=CountingTensors(model.tensors))


def merge_open(
    base: Model,
    experts: Sequence[Model],
    out: Path,
    variants: Sequence[Mapping[str, Any]] = ({},),
    *,
    workers: int = 1,
) -> list[dict[str, Tensor]]:
    """Plan and execute variants of one merge, as the public functions do, over open models."""
    shared = {"base": "base", "experts": [{"path": f"expert{i}"} for i in range(len(experts))], "method": "actmat"}
    recipes = tuple(make_recipe(shared | fields) for fields in variants)
    inputs = Inputs(recipes, base, [StoredDeltas(e) for e in experts], ExpertStatistics.none(recipes[0].labels))
    folders = [out / str(number) for number in range(len(variants))]
    with started(inputs, folders, in_memory=True) as run:
        executor = ThreadExecutor(inputs, run.writers, Resources(workers, 1 << 33))
        run.survey(executor)
        run.take(executor.run(run.spec, run.units))
        assert not run.findings.fatal, run.findings.problems()
        run.finish()
    return [load_file(folder / "model.safetensors") for folder in folders]


def merge_tensors(base: Tensors, experts: Sequence[Tensors], folder: Path, **fields: Any) -> actmat.MergeReport:
    """Save tensors as bare files in `folder` and merge them into `folder/out` with the public function."""
    folder.mkdir(exist_ok=True)
    for name, tensors in {"base": base, **{f"expert{i}": e for i, e in enumerate(experts)}}.items():
        save_file(dict(tensors), folder / f"{name}.safetensors")
    places = [folder / f"expert{i}.safetensors" for i in range(len(experts))]
    settings = {"method": "actmat", "threads": 1, "durable": False, "out": folder / "out", **fields}
    return actmat.merge(folder / "base.safetensors", places, **settings)


def output(report: actmat.MergeReport) -> dict[str, Tensor]:
    """Tensors of an output in one file."""
    return load_file(report.out / "model.safetensors")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit by bit (`torch.equal` takes -0.0 for 0.0)."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
