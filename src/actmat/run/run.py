"""Stage two of a run: all its decisions, in one frozen value: plans, limits and observers over open inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from actmat.diagnostics.checks import check_codes
from actmat.diagnostics.observer import ItemObserver
from actmat.engine.inputs import Inputs
from actmat.engine.observer import ObserverFactory
from actmat.engine.resources import Resources, share_resources
from actmat.planning import MergePlan, build_plan
from actmat.planning.work import DeviceRoom
from actmat.run.places import Places


@dataclass(frozen=True)
class Run:
    """A run, ready to be carried out.

    Args:
        inputs: opened.
        plans: of all recipes.
        places: of the run.
        resources: workers and memory.
        observers: makes those of a run that is measured.
    """

    inputs: Inputs
    plans: tuple[MergePlan, ...]
    places: Places
    resources: Resources
    observers: ObserverFactory | None

    @property
    def unfinished(self) -> list[tuple[Path | str, MergePlan]]:
        """Outputs that no earlier run finished, with their plans."""
        pairs = zip(self.places.outs, self.plans, strict=True)
        return [(out, plan) for out, plan in pairs if out not in self.places.finished]


def prepare(inputs: Inputs, places: Places, *, measured: bool | None = None) -> Run:
    """Plan the recipes and divide the resources of the run.

    Args:
        inputs: opened.
        places: of the run.
        measured: whether the run is measured; default: as the settings say.

    Raises:
        MergeError: all problems of the plans, together with those found before; or too little memory.
    """
    settings = places.settings
    measured = settings.diagnose if measured is None else measured
    if measured:
        with inputs.problems.noted():
            check_codes([code for recipe in inputs.recipes for code in recipe.mute])
    plans = plan_all(inputs, places.room)
    observers = functools.partial(ItemObserver, seed=plans[0].recipe.seed) if measured else None
    unfinished = [p for out, p in zip(places.outs, plans, strict=False) if out not in places.finished]
    resources = share_resources(
        unfinished or plans,
        places.room,
        settings.max_memory,
        settings.threads,
        measured,
        inputs.buffer_bytes,
    )
    return Run(inputs, plans, places, resources, observers)


def plan_all(inputs: Inputs, room: DeviceRoom) -> tuple[MergePlan, ...]:
    """Plans of all recipes, for these devices.

    Raises:
        MergeError: all their problems, together with those found before.
    """
    plans = []
    for recipe in (r.model_copy(update={"executor": None}) for r in inputs.recipes):  # not a part of the merge
        with inputs.problems.noted():
            plans.append(
                build_plan(
                    recipe,
                    inputs.base,
                    inputs.experts,
                    room=room,
                    statistics=inputs.statistics,
                    base_config=inputs.base_config,
                )
            )
    inputs.problems.check()
    return tuple(plans)
