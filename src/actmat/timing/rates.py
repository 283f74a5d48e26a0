"""Rates of a machine: how they are kept in a file, and how long operations take at them.

Rates of matrix routines depend on the size of the matrices. Each is kept for some sizes; between them it is
interpolated over the logarithm of the size, beyond them it is that of the nearest.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from actmat.bounds import read_object
from actmat.errors import RecipeError
from actmat.linalg.operations import Operation

__all__ = [
    "FORMAT",
    "Compute",
    "DeviceRates",
    "HostRates",
    "Rates",
    "load_rates",
    "rates_file",
    "save_rates",
    "seconds",
]

FORMAT = 1
"""Version of the file; see docs/commands/calibrate.md."""

Compute = Mapping[str, tuple[tuple[int, float], ...]]
"""`"product float32"` -> (size, operations per second) in ascending order of size."""


class _Plain:
    """Data that is read back from JSON: a field that is not known is a mistake."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class HostRates(_Plain):
    """Rates of one core with one thread, and of the storage that all share.

    Args:
        compute: of matrix routines, `"KIND float32"` or `"KIND float64"`, see `linalg.operations`.
        entry: entries per second of an elementwise operation, per pass.
        delta: entries per second of a delta: widened, subtracted, checked.
        output: entries per second of the output: added to the base and rounded.
        hash: bytes per second of hashing.
        disk_read, disk_write: bytes per second from and to storage, synced.
        cached_read: bytes per second of files that the system holds in memory.
        tensor_s: seconds that each tensor takes besides.
        start_s: seconds until a process begins to merge.
        busy: share of its rate that a core keeps while all cores compute products (`"matrix"`) or elementwise
            operations (`"entry"`).
    """

    compute: Compute
    entry: float
    delta: float
    output: float
    hash: float
    disk_read: float
    disk_write: float
    cached_read: float
    tensor_s: float
    start_s: float
    busy: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DeviceRates(_Plain):
    """Rates of one accelerator.

    Args:
        name: as its maker calls it.
        compute, entry: as `HostRates`, on the device.
        transfer: bytes per second between host and device.
    """

    name: str
    compute: Compute
    entry: float
    transfer: float


@dataclass(frozen=True, slots=True)
class Rates(_Plain):
    """Rates of one machine.

    Args:
        host: name of the machine; `processor`, `cores`: what it is.
        date: of the measurement; `versions`: of the software that was measured; `load`: processes that were running
            on average when it began.
        rates: of its cores and storage.
        devices: kind of accelerator ("cuda", "mps") -> rates of one.
    """

    host: str
    processor: str
    cores: int
    date: str
    versions: Mapping[str, str]
    rates: HostRates
    load: float = 0.0
    devices: Mapping[str, DeviceRates] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same rates."""
        found: dict[str, Any] = _RATES.dump_python(self, mode="json")
        return {"actmat_rates": FORMAT, **found}

    def lines(self) -> list[str]:
        """The rates in words, those of the largest matrices."""
        host = self.rates
        found = [f"{where}{_in_words(c)}" for where, c in (("one core: ", host.compute), *(
            (f"{kind} ({d.name}): ", d.compute) for kind, d in self.devices.items()))]  # fmt: skip
        return [
            *found,
            f"all {self.cores} cores at work: {host.busy['matrix']:.0%} of that each, {host.busy['entry']:.0%} "
            "elementwise",
            f"deltas {host.delta / 1e9:.2g} G entries/s, output {host.output / 1e9:.2g} G entries/s, hashing "
            f"{host.hash / 1e9:.2g} GB/s",
            f"storage: read {host.disk_read / 1e9:.2g} GB/s, write {host.disk_write / 1e9:.2g} GB/s, in memory "
            f"{host.cached_read / 1e9:.2g} GB/s",
            f"start {host.start_s:.1f} s, each tensor {1e3 * host.tensor_s:.2g} ms",
        ]

    @classmethod
    def from_json(cls, data: Any) -> Rates:
        """The rates that `to_json` wrote, or that a user wrote by hand.

        Raises:
            RecipeError: not rates of this version, or a rate is missing or not positive; carries all problems.
        """
        found = data.get("actmat_rates") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise RecipeError(f"expected a file of rates of layout {FORMAT} ('actmat_rates'), found {found!r}")
        try:
            rates = _RATES.validate_python({k: v for k, v in data.items() if k != "actmat_rates"})
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise RecipeError("The file of rates cannot be used.", problems) from None
        if problems := list(_problems(rates)):
            raise RecipeError("The file of rates cannot be used.", problems)
        return rates


_RATES = TypeAdapter(Rates)

KINDS = ("product", "cholesky", "eigh", "svd")


def _problems(rates: Rates) -> Iterator[str]:
    """Rates that are missing, or with which a time cannot be computed."""
    host = rates.rates
    yield from _table_problems("rates", host.compute)
    for name in ("entry", "delta", "output", "hash", "disk_read", "disk_write", "cached_read"):
        yield from _rate_problems(f"rates.{name}", getattr(host, name))
    for kind, device in rates.devices.items():
        yield from _table_problems(f"devices.{kind}", device.compute)
        yield from _rate_problems(f"devices.{kind}.entry", device.entry)
        yield from _rate_problems(f"devices.{kind}.transfer", device.transfer)
    for name in ("matrix", "entry"):
        if not 0 < host.busy.get(name, 0) <= 1:
            yield f"rates.busy.{name}: expected a share in (0, 1], found {host.busy.get(name)}"
    for name in ("tensor_s", "start_s"):
        if not 0 <= getattr(host, name) < math.inf:
            yield f"rates.{name}: expected seconds, found {getattr(host, name)}"


def _table_problems(where: str, compute: Compute) -> Iterator[str]:
    for key in (f"{kind} {dtype}" for kind in KINDS for dtype in ("float32", "float64")):
        table = compute.get(key, ())
        sizes = [size for size, _ in table]
        if not table:
            yield f"{where}.compute: '{key}' is missing; give [[size, operations per second], ...]"
        elif sizes != sorted({s for s in sizes if s > 0}) or not all(_positive(rate) for _, rate in table):
            yield f"{where}.compute.{key}: expected ascending sizes and positive rates, found {list(table)}"


def _rate_problems(where: str, rate: float) -> Iterator[str]:
    if not _positive(rate):
        yield f"{where}: expected a positive rate, found {rate}"


def _in_words(compute: Compute) -> str:
    return ", ".join(f"{key} {table[-1][1] / 1e9:.3g}" for key, table in compute.items()) + " GFLOP/s"


def _positive(number: float) -> bool:
    return 0 < number < math.inf


def seconds(operation: Operation, rates: HostRates | DeviceRates, dtype: str) -> float:
    """Time of operations on one core, or on one device.

    Args:
        dtype: the compute dtype, of operations that are not in float64 anyhow.
    """
    if operation.kind == "entry":
        return operation.flops / rates.entry
    table = rates.compute[f"{operation.kind} {'float64' if operation.double else dtype}"]
    return operation.flops / _at(table, operation.size)


def _at(table: tuple[tuple[int, float], ...], size: int) -> float:
    """The rate at a size."""
    sizes = [s for s, _ in table]
    k = bisect.bisect_left(sizes, size)
    if k == 0 or k == len(table):
        return table[min(k, len(table) - 1)][1]
    (low, slow), (high, fast) = table[k - 1], table[k]
    share = math.log(size / low) / math.log(high / low)
    return float(slow ** (1 - share) * fast**share)


def rates_file() -> Path:
    """File of this machine's rates: `actmat/rates/HOST.json` in the user's folder of caches."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    host = re.sub(r"[^\w.-]", "_", platform.node()) or "machine"
    return home / "actmat" / "rates" / f"{host}.json"


def save_rates(rates: Rates, path: Path) -> None:
    """Write rates; the file appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(rates.to_json(), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load_rates(path: Path | None = None) -> Rates:
    """Rates of a file; of this machine by default.

    Raises:
        RecipeError: there is no such file, or it holds no usable rates.
    """
    chosen = path or rates_file()
    if not chosen.exists():
        raise RecipeError(
            "This machine has not been calibrated: run 'actmat calibrate' (a minute), or give --rates FILE."
            if path is None
            else f"--rates: there is no file {chosen}; 'actmat calibrate --out {chosen}' makes one."
        )
    data = read_object(chosen, error=RecipeError)
    try:
        return Rates.from_json(data)
    except RecipeError as error:
        raise RecipeError(f"{chosen}: {error.headline}", error.problems) from None
