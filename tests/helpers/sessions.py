"""Merge units through a `Session`: in this process, or in one that was started for it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actmat.checkpoints.writing.writer import ShardWriter
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.observer import ObserverFactory
from actmat.engine.resources import Resources
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.units import Unit, plan_units
from actmat.planning.work import HOST, DeviceRoom
from actmat.recipe import make_recipe
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all

Run = tuple[SessionSpec, list[Unit], list[UnitResult]]


def run_here(
    fields: Sequence[dict[str, Any]],
    folders: Sequence[Path],
    observers: ObserverFactory | None = None,
    room: DeviceRoom = HOST,
    *,
    finish: bool = True,
) -> Run:
    """Merge recipes that share inputs into `folders`, on the host, by a plan for the devices of `room`.

    Returns the spec with its surveys, the units and the results; without `finish`, tensors may be missing.
    """
    recipes = [make_recipe(f) for f in fields]
    with open_inputs(recipes) as (inputs, _):
        plans = plan_all(inputs, room)
        writers = []
        for plan, folder in zip(plans, folders, strict=True):
            folder.mkdir(parents=True)
            writers.append(ShardWriter(folder, plan.shards, durable=False))
        base = None if inputs.base is None else inputs.base.tensors.handle()
        spec = SessionSpec(plans, base, tuple(e.handle() for e in inputs.experts), tuple(folders), observers)
        executor = ThreadExecutor(inputs, writers, Resources(1, 1 << 33))
        spec = dataclasses.replace(spec, surveys=executor.survey(spec))
        units = plan_units(plans, [()] * len(plans), observers)
        results = list(executor.run(spec, units))
        for plan, writer in zip(plans, writers, strict=True):
            if finish:
                writer.finish(plan.specs)
    return spec, units, results


def merge_units(spec: SessionSpec, units: Sequence[Unit]) -> list[UnitResult]:
    """Results of all units, of a session opened for them."""
    torch.set_num_threads(1)
    with Session.open(spec) as session:
        return [session.merge(unit) for unit in units]
