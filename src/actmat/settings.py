"""Settings of a run: where and how a merge computes. Unlike a recipe, they do not decide the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from actmat.flag import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run. Only `device` can change the result, in its last bits.

    The text of each flag documents its field.

    >>> RunSettings(threads=4, max_memory="4GB").device
    'cpu'
    """

    device: Annotated[str, Flag(help="Where matrices are merged: cpu, cuda (all GPUs), cuda:0,2 (those), mps.")] = "cpu"
    device_memory: Annotated[
        str | int | None, Flag(help="Memory limit of each device, such as 40GB; larger tensors are merged on the host.")
    ] = None
    max_memory: Annotated[
        str | int | None, Flag(help="Memory limit, such as 4GB; default: nine tenths of the free memory.")
    ] = None
    threads: Annotated[
        int | None, Flag(help="Tensors merged at the same time; does not change the result; default: all cores.")
    ] = None
    overwrite: Annotated[bool, Flag(help="Replace an earlier output of actmat; refused if other files are there.")] = (
        False
    )
    durable: bool = True
    """Wait until the output is on the disk before renaming it."""
    sha256: bool = False
    """Add SHA-256 of the weight files to the manifest."""
    diagnose: Annotated[bool, Flag(help="Measure and check while merging, and write a report into the output.")] = False
    executor: Annotated[
        str | None,
        Flag(help="Executor: threads, ray or ray=ADDRESS, see docs/cluster.md; default: the recipe's, else threads."),
    ] = None
    held: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False)
    """Inputs in memory: place that the recipe gives one -> opens it, as `locate` does."""
