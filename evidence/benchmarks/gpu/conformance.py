"""The conformance suite of executors with items on the device, and an item that does not fit.

A device gives the host's values up to the rounding of its own products, so outputs are compared within `NEAR`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import actmat
from benchmarks.common import largest_difference
from benchmarks.gpu.rows import arguments, give
from benchmarks.make_llama import Size, make_family
from benchmarks.provenance import REPOSITORY

NEAR = 1e-3
"""Largest relative difference of a tensor that is stored in float32 or half precision."""


def main() -> None:
    """Print a row per test; the suite is a program of the repository's tests."""
    given = arguments()
    command = [sys.executable, "-m", "tests.devices.on_device", given.device]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            give(**json.loads(line))
    if suite.returncode:
        raise SystemExit(suite.returncode)
    does_not_fit(given.device, given.folder)


def does_not_fit(device: str, folder: Path) -> None:
    """With a limit below the largest matrix, that is merged on the host, as the plan says; the rest on the device."""
    size = Size(hidden=128, intermediate=512, layers=2, heads=4, key_value_heads=2, vocabulary=1000)
    base, experts = make_family(folder / "fit", size, 2)
    whole = actmat.plan(base, experts, device=device)
    limit = max(i.cost.device_bytes for i in whole.items) - 1
    began = time.perf_counter()
    report = actmat.merge(base, experts, out=folder / "fit-out", device=device, device_memory=limit, overwrite=True)
    actmat.merge(base, experts, out=folder / "fit-host", overwrite=True)
    moved, all_of_it = len(report.plan.on_device), len(whole.on_device)
    difference = largest_difference(folder / "fit-out", folder / "fit-host")
    good = 0 < moved < all_of_it and difference <= (0.0 if device.startswith("cpu") else NEAR)
    outcome = "passed" if good else f"{moved} of {all_of_it} on the device, difference {difference:.2g}"
    give(test="an item that does not fit", outcome=outcome, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
