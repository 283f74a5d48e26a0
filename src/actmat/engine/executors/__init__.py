"""Executors: one file or package for each place that units can run in; `base.Executor` is the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.executors.devices import DeviceExecutor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.errors import RecipeError, did_you_mean
from actmat.extras.ray import RayExecutor, ray_at

__all__ = ["AUTO", "EXECUTORS", "computes_here", "find_executor"]

AUTO, DEVICES, THREADS = "auto", "devices", "threads"
"""Names; `auto`, that of a run that names none, takes `devices` where there are devices, else `threads`."""

EXECUTORS: Mapping[str, ExecutorFactory] = {THREADS: ThreadExecutor, DEVICES: DeviceExecutor, "ray": RayExecutor}
"""Every executor, by the name under which a run asks for it."""

ADDRESSED: Mapping[str, Callable[[str], ExecutorFactory]] = {"ray": ray_at}
"""Executors that take an address, `NAME=ADDRESS`: address, or "" -> the executor there."""

ELSEWHERE = frozenset({"ray"})
"""Executors whose units run on other machines, which may have other devices."""


def find_executor(text: str, device: str = "cpu") -> ExecutorFactory:
    """The executor that `NAME` or `NAME=ADDRESS` names, see also `AUTO`.

    Args:
        text: the name.
        device: see `devices.names`.

    Raises:
        RecipeError: there is none, with those that there are; or it does not fit the devices. Or it takes no address,
            or its packages are not installed.
    """
    if text == AUTO:
        return EXECUTORS[THREADS if device == "cpu" else DEVICES]
    name, equals, address = text.partition("=")
    if name not in EXECUTORS:
        hint = did_you_mean(name, EXECUTORS)
        raise RecipeError(f"There is no executor '{name}'.{hint} Executors: {', '.join((AUTO, *EXECUTORS))}.")
    if name in ELSEWHERE and device not in ("cpu", "cuda"):
        raise RecipeError(
            f"The executor '{name}' gives every worker a GPU of its own; found the device '{device}'. Write "
            "--device cuda."
        )
    if name in ADDRESSED:
        return ADDRESSED[name](address)
    if equals:
        raise RecipeError(f"The executor '{name}' takes no address; found '{text}'. Write '{name}'.")
    if name == THREADS and device != "cpu":
        raise RecipeError(
            f"The executor 'threads' computes on the host, and the device is '{device}': several threads would share "
            "a device. Leave the executor out, or the device."
        )
    if name == DEVICES and device == "cpu":
        raise RecipeError("The executor 'devices' needs devices; give --device, such as cuda.")
    return EXECUTORS[name]


def computes_here(text: str) -> bool:
    """True if the units of this executor run on this machine, with its devices."""
    return text.partition("=")[0] not in ELSEWHERE
