"""Settings of a run: where and how a merge computes. Unlike a recipe, they do not decide the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

from actmat.errors import RecipeError
from actmat.flag import Flag, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run. Only `device` can change the result, in its last bits.

    The text of each annotation documents its field.

    >>> RunSettings(threads=4, max_memory="4GB").device
    'cpu'
    """

    device: Annotated[str, Flag(help="Where matrices are merged: cpu, cuda (all GPUs), cuda:0,2 (those).")] = "cpu"
    device_memory: Annotated[
        str | int | None, Setting("Memory limit of each device, such as 40GB; larger tensors are merged on the host.")
    ] = None
    max_memory: Annotated[
        str | int | None, Flag(help="Memory limit, such as 4GB; default: nine tenths of the free memory.")
    ] = None
    threads: Annotated[
        int | None, Flag(help="Tensors merged at the same time; does not change the result; default: all cores.")
    ] = None
    overwrite: Annotated[bool, Flag(help="Replace an earlier output of actmat.")] = False
    durable: Annotated[bool, Setting("Wait until the output is on the disk before renaming it.")] = True
    diagnose: Annotated[bool, Flag(help="Measure and check while merging; write a report.")] = False
    executor: Annotated[
        str | None,
        Setting("Executor: threads, ray or ray=ADDRESS, see docs/cluster.md; default: the recipe's, else threads."),
    ] = None
    held: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False)
    """Inputs in memory: place that the recipe gives one -> opens it, as `locate` does."""

    def __post_init__(self) -> None:
        """Check types, which a recipe's fields have checked for them."""
        kinds = get_type_hints(RunSettings)
        wrong = [
            f"{name}: expected {getattr(kinds[name], '__name__', kinds[name])}, found {value!r}"
            for name in self.__slots__
            if name != "held" and not isinstance(value := getattr(self, name), kinds[name])
        ]
        if wrong:
            raise RecipeError("Invalid settings of a run.", wrong)
