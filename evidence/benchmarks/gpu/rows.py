"""What the parts share: their arguments, rows for the driver, and time and memory of a device."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MARK = "ROW "
NAMES = ("fact", "test", "model", "shape", "method", "size", "what")
"""Columns that together name a row."""


def arguments(**more: Any) -> argparse.Namespace:
    """The command line of a part; `more`: choices of one flag each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    for name, choices in more.items():
        parser.add_argument(f"--{name}", choices=choices, required=True)
    return parser.parse_args()


def give(**row: Any) -> None:
    """Print a row for the driver."""
    print(MARK + json.dumps(row), flush=True)


def add_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row, or its further columns to the row of the same name."""
    same = next((r for r in rows if all(r.get(key) == row.get(key) for key in NAMES)), None)
    if same is None:
        rows.append(row)
    else:
        same |= row


def torch_device(name: str) -> torch.device:
    """`cpu:0` is simulated."""
    return torch.device("cpu" if name.startswith("cpu") else name)


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Median seconds of `work()`, synchronized, after one call that is not counted unless it took three seconds."""
    times: list[float] = []
    for _ in range(repeats + 1):
        finish(device)
        began = time.perf_counter()
        work()
        finish(device)
        times.append(time.perf_counter() - began)
        if sum(times) > 3:
            break
    return statistics.median(times[1:] or times)


def clear_peak(device: torch.device) -> None:
    """Begin to measure the peak of allocated memory anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Largest allocated memory of the device since `clear_peak`; 0 for a simulated one."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
