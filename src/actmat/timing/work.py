"""The work of every unit of a plan, in seconds and bytes, at the rates of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actmat.engine.units import Unit, plan_units, planned_seconds
from actmat.errors import RecipeError
from actmat.linalg.operations import Operation
from actmat.planning.cost import item_operations
from actmat.planning.model import Item, MergePlan
from actmat.planning.pools import pooled
from actmat.timing.rates import DeviceRates, Rates, seconds

__all__ = ["Work", "work_of"]


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one unit.

    Args:
        name: of its first item.
        read_bytes, write_bytes: traffic to and from storage.
        serial_s: seconds of one worker that no other can take over.
        shared_s: seconds of one worker that are cut into `panels`, which idle workers of its node may share.
        panels: how many times faster all workers of a node compute these; not a whole number, as some computations
            have fewer panels than others.
        host_bytes: peak memory.
    """

    name: str
    read_bytes: int
    write_bytes: int
    serial_s: float
    shared_s: float = 0.0
    panels: float = 1.0
    host_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Computing time on one worker."""
        return self.serial_s + self.shared_s


def work_of(plan: MergePlan, rates: Rates, *, workers: int) -> list[Work]:
    """Work of all units, in the order in which an executor of several workers begins them.

    Args:
        plan: what is to be done.
        rates: of each machine that does it.
        workers: number of workers on a machine.

    Raises:
        RecipeError: the plan computes on a device of which the rates say nothing.
    """
    device = None
    kind = plan.device.partition(":")[0]
    if kind != "cpu":
        device = rates.devices.get(kind)
        if device is None:
            raise RecipeError(
                f"The plan computes on '{plan.device}', but the rates of {rates.host} have no device '{kind}'. Fix: "
                "run 'actmat calibrate' on a machine with one, or write its rates into the file (docs/commands/"
                "calibrate.md), and give it with --rates."
            )
    counter = _Counter(plan, rates, device, workers)
    units = sorted(plan_units([plan], [()], None), key=planned_seconds, reverse=True)
    return [counter.work(unit) for unit in units]


class _Counter:
    """Turns operations and bytes into seconds; equal tensors are counted once."""

    def __init__(self, plan: MergePlan, rates: Rates, device: DeviceRates | None, workers: int) -> None:
        self._plan = plan
        self._host = rates.rates
        self._device = device
        self._dtype = plan.recipe.compute_dtype
        self._workers = workers
        busy = rates.rates.busy if min(workers, rates.cores) > 1 else {}
        self._matrix, self._entry = busy.get("matrix", 1.0), busy.get("entry", 1.0)
        self._known: dict[object, tuple[float, float, float]] = {}

    def work(self, unit: Unit) -> Work:
        """Work of one unit."""
        items = [self._plan.items[group[0][1]] for group in unit.groups]
        serial, shared, panels = self._computing(items)
        serial += sum(self._passing(item) for item in items)
        return Work(
            name=unit.name,
            read_bytes=sum(i.cost.read_bytes for i in items),
            write_bytes=sum(i.cost.write_bytes for i in items),
            serial_s=serial,
            shared_s=shared,
            panels=panels,
            host_bytes=unit.host_bytes,
        )

    def _passing(self, item: Item) -> float:
        """Seconds of everything around the method: hashing, deltas, the output; reading is not in it."""
        bytes_hashed = item.cost.read_bytes + item.cost.write_bytes
        found = bytes_hashed / self._host.hash
        if item.call is not None and item.base_dtype and not self._is_moved(item):
            stored = sum(s is not None and s.kind == "stored" for s in item.sources)
            found += item.numel * (stored / self._host.delta + 1 / self._host.output)
        return self._host.tensor_s + found / self._entry

    def _computing(self, items: Sequence[Item]) -> tuple[float, float, float]:
        """Seconds that are serial and shared, and `Work.panels`, of a method on an item or a pool."""
        item = items[0] if len(items) == 1 else pooled(items)
        if item.call is None:
            return 0.0, 0.0, 1.0
        ranks = tuple(0 if s is None else s.rank for s in item.sources)
        moved = sum(i.cost.read_bytes + i.cost.write_bytes for i in items) if self._is_moved(item) else 0
        key = (item.call.method, str(item.call.options), item.shape, item.layout, item.form, ranks, moved)
        if key not in self._known:
            self._known[key] = self._sums(item_operations(item, self._dtype), moved)
        return self._known[key]

    def _is_moved(self, item: Item) -> bool:
        """True if an accelerator merges the item."""
        return self._device is not None and item.cost.device_bytes > 0

    def _sums(self, operations: Sequence[Operation], moved: int = 0) -> tuple[float, float, float]:
        serial = shared = together = 0.0
        if moved and self._device is not None:  # stored bytes go there, those of the output come back
            computing = sum(seconds(o, self._device, self._dtype) for o in operations)
            return computing + moved / self._device.transfer, 0.0, 1.0
        for operation in operations:
            took = seconds(operation, self._host, self._dtype)
            took /= self._entry if operation.kind == "entry" else self._matrix
            if operation.panels > 1:
                shared += took
                together += took / min(self._workers, operation.panels)
            else:
                serial += took
        return serial, shared, shared / together if together else 1.0
