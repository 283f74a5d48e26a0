"""Kernels make the output of an item, one module each; the plan names them (`planning.item.Kernel`).

`run(tasks, reader)` merges and writes one unit, and returns the records of its tasks in their order; none if the
inputs cannot be merged. `tasks` are the outputs of the unit's item that share what `reader` reads: a `TensorReader`,
or an `AdapterReader` for items without a base. All write by `engine.writing`.

To add a kernel: a module with such a function, an entry here, its name in `planning.item.Kernel`, and a test that
compares its output with the formula in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actmat.engine.kernels import combine, copy, dense, extracted, factored
from actmat.engine.task import Record, Task
from actmat.planning.item import Kernel

__all__ = ["KERNELS", "KernelRun"]

KernelRun = Callable[[Sequence[Task], Any], list[Record]]

KERNELS: Mapping[Kernel, KernelRun] = {
    "copy": copy.run,
    "dense": dense.run,
    "combine": combine.run,
    "factored": factored.run,
    "extracted": extracted.run,
}
"""Every kernel by its name."""
