"""Kernel `copy`: the base's bytes, in the output dtype."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.engine.kernels.regions import by_regions
from actmat.engine.reader import TensorReader
from actmat.engine.task import Record, Task


def run(tasks: Sequence[Task], reader: TensorReader) -> list[Record]:
    """Copy one tensor into the outputs of all tasks."""
    return by_regions(tasks, reader, None)
