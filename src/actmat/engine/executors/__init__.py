"""Executors: one file for each place that units can run in; `base.Executor` is the contract."""

from __future__ import annotations

from collections.abc import Mapping

from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.executors.devices import DeviceExecutor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.errors import RecipeError, did_you_mean

__all__ = ["EXECUTORS", "find_executor"]

EXECUTORS: Mapping[str, ExecutorFactory] = {"threads": ThreadExecutor, "devices": DeviceExecutor}
"""Every executor, by the name under which a run asks for it."""


def find_executor(name: str, device: str = "cpu") -> ExecutorFactory:
    """The executor of that name; `auto` takes `devices` where there are devices, else `threads`.

    Args:
        device: see `devices.names`.

    Raises:
        RecipeError: there is none, with those that there are; or it does not fit the devices.
    """
    if name == "auto":
        return EXECUTORS["threads" if device == "cpu" else "devices"]
    if name not in EXECUTORS:
        hint = did_you_mean(name, EXECUTORS)
        raise RecipeError(f"There is no executor '{name}'.{hint} Executors: {', '.join(('auto', *EXECUTORS))}.")
    if name == "threads" and device != "cpu":
        raise RecipeError(
            f"The executor 'threads' computes on the host, and the device is '{device}': several threads would share "
            "a device. Leave the executor out, or the device."
        )
    if name == "devices" and device == "cpu":
        raise RecipeError("The executor 'devices' needs devices; give --device, such as cuda.")
    return EXECUTORS[name]
