"""All decisions of a run, in one frozen value: plans, limits and observers over opened inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actmat.diagnostics.observer import Observers
from actmat.engine.inputs import Inputs
from actmat.engine.resources import Resources, share_resources
from actmat.planning import MergePlan, build_plan
from actmat.planning.work import DeviceRoom
from actmat.run.open import Opened
from actmat.run.places import OutputPlace


@dataclass(frozen=True)
class Prepared:
    """A run, ready to be carried out.

    Args:
        plans: of all recipes.
        inputs: opened.
        place: of the run.
        resources: workers and memory.
        observers: of a run that is measured.
        began: start of the run on the performance counter.
    """

    plans: tuple[MergePlan, ...]
    inputs: Inputs
    place: OutputPlace
    resources: Resources
    observers: Observers | None
    began: float

    @property
    def unfinished(self) -> list[tuple[Path | str, MergePlan]]:
        """Outputs that no earlier run finished, with their plans."""
        pairs = zip(self.place.outs, self.plans, strict=True)
        return [(out, plan) for out, plan in pairs if out not in self.place.finished]


def prepare(opened: Opened, *, measured: bool | None = None) -> Prepared:
    """Plan the recipes and divide the resources of the run.

    Args:
        opened: the recipes and their inputs.
        measured: whether the run is measured; default: as the settings say.

    Raises:
        MergeError: all problems of the plans, together with those found before; or too little memory.
    """
    place, settings, inputs = opened.place, opened.place.settings, opened.inputs
    plans = plans_of(opened, place.room)
    measured = settings.diagnose if measured is None else measured
    observers = Observers(plans[0].recipe.seed) if measured else None
    unfinished = [p for out, p in zip(place.outs, plans, strict=False) if out not in place.finished]
    resources = share_resources(
        unfinished or plans,
        place.room,
        settings.max_memory,
        settings.threads,
        observers,
        inputs.buffer_bytes,
    )
    if any(isinstance(out, str) for out in place.outs):  # shards that are finished can be sent
        resources = replace(resources, in_order=True)
    return Prepared(tuple(plans), inputs, place, resources, observers, opened.began)


def plans_of(opened: Opened, room: DeviceRoom | None = None) -> Sequence[MergePlan]:
    """Plans of opened recipes, for the devices of their place or of `room`.

    Raises:
        MergeError: all their problems, together with those found before.
    """
    inputs, problems, plans = opened.inputs, opened.problems, []
    for recipe in (r.model_copy(update={"executor": None}) for r in opened.recipes):  # not a part of the merge
        with problems.noted():
            plans.append(
                build_plan(
                    recipe,
                    inputs.base,
                    inputs.experts,
                    room=opened.place.room if room is None else room,
                    statistics=inputs.statistics,
                    base_config=opened.base_config,
                )
            )
    problems.check()
    return plans
