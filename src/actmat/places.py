"""The place of a run: its executor, devices, limits and output, from the settings and the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat.bounds import is_url
from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices.device import device_room
from actmat.engine.devices.names import check_device, check_device_name
from actmat.engine.executors import AUTO, computes_here, find_executor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import ObserverFactory
from actmat.engine.resources import Resources, share_resources
from actmat.errors import RecipeError
from actmat.inputs import Problems
from actmat.planning import MergePlan
from actmat.planning.placement import HOST, DeviceRoom
from actmat.recipe import Recipe
from actmat.settings import RunSettings

__all__ = ["checked_room", "executor_of", "out_path", "resources_of"]


def executor_of(settings: RunSettings, recipe: Recipe) -> str:
    """Name of the executor: the settings' if they name one, else the recipe's, else `auto`.

    >>> from actmat.recipe import make_recipe
    >>> recipe = make_recipe({"base": "base", "experts": ["math"], "executor": "ray"})
    >>> executor_of(RunSettings(), recipe), executor_of(RunSettings(executor="threads"), recipe)
    ('ray', 'threads')
    """
    return settings.executor or recipe.executor or AUTO


def checked_room(settings: RunSettings, executor: str, problems: Problems) -> DeviceRoom:
    """The devices of a run; problems with them and with its executor are noted.

    They must be on this machine, unless the executor computes on others.
    """
    room = HOST
    with problems.noted():
        find_executor(executor, settings.device)
    with problems.noted():
        (check_device if computes_here(executor) else check_device_name)(settings.device)
        room = device_room(settings.device, settings.device_memory)
    return room  # noqa: RET504 - after a problem it is still the host


def resources_of(
    plans: Sequence[MergePlan], settings: RunSettings, inputs: Inputs, observers: ObserverFactory | None = None
) -> Resources:
    """Workers and memory for these plans over opened inputs, see `share_resources`."""
    limit = None if settings.device_memory is None else parse_size(settings.device_memory)
    return share_resources(
        plans, settings.device, settings.max_memory, settings.threads, observers, limit, inputs.buffer_bytes
    )


def out_path(recipe: Recipe) -> Path | str:
    """Final directory of a recipe's output, or its URL.

    Raises:
        RecipeError: it names none.
    """
    if recipe.out is None:
        raise RecipeError("Where shall the merged model go? Give --out, or 'out' in the recipe.")
    if is_url(recipe.out):
        return recipe.out.rstrip("/")
    out = Path(recipe.out)
    return out if out.name not in ("", "..") else out.resolve()  # '.' and '..' have no siblings to build in
