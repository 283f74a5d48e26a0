"""Requests of the commands `experiment run` and `experiment table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request of `actmat experiment run`; None means the suite's own choice.

    Args:
        cache: folder of all stages, logs and scores.
        models: architectures, or checkpoints of the base.
        methods: rows to compare.
        regimes: how experts are trained: "full", "lora".
        seeds: one run each.
        data: folder of local data sets; None: from the hub.
        device: where models compute.
        threads: workers of the merges.
        settings: the suite's own settings, by name.
        console: where progress and tables go.
    """

    suite: str
    cache: Path
    models: Sequence[str] | None = None
    tasks: Sequence[str] | None = None
    methods: Sequence[str] | None = None
    regimes: Sequence[Literal["full", "lora"]] = ("full",)
    seeds: Sequence[int] = (0,)
    data: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    console: Console | None = None


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A request of `actmat experiment table`.

    Args:
        cache: folder that `run` has filled.
    """

    suite: str
    cache: Path
    markdown: bool = False
    console: Console | None = None
