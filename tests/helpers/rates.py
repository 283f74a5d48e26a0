"""Rates of a machine that does one operation, entry or byte in a nanosecond, for predictions by hand."""

from __future__ import annotations

from typing import Any

from actmat.timing.rates import KINDS, DeviceRates, HostRates, Rates

RATE = 1e9

COMPUTE = {f"{kind} {dtype}": ((64, RATE),) for kind in KINDS for dtype in ("float32", "float64")}


def rates_of(*, cores: int = 1, devices: bool = False, **given: Any) -> Rates:
    """Such rates; fields of `HostRates` may be given."""
    names = ("entry", "delta", "output", "hash", "disk_read", "disk_write", "cached_read")
    fields = dict.fromkeys(names, RATE) | {"tensor_s": 0.0, "start_s": 0.0, "busy": {"matrix": 1.0, "entry": 1.0}}
    host = HostRates(**{"compute": COMPUTE, **fields, **given})
    fast = dict.fromkeys(COMPUTE, ((64, 100 * RATE),))
    return Rates(
        host="node",
        processor="a processor",
        cores=cores,
        date="2026-01-01",
        versions={"actmat": "0"},
        rates=host,
        devices={"cuda": DeviceRates("a device", fast, RATE, RATE)} if devices else {},
    )
