"""Origin of a number: the machine, the date and the commit of the sources that made it.

Sources that are no git checkout, such as an installed copy on another machine, name their commit in the environment
variable `ACTMAT_COMMIT`.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

Origin = Mapping[str, str]
"""`machine`, `date` and `commit`."""
_FILE = "origin.json"
UNKNOWN: Origin = dict.fromkeys(("machine", "date", "commit"), "unknown")
"""Of experts that were trained before this was recorded."""


def current_origin(device: str = "cpu") -> dict[str, str]:
    """Origin of what is computed now.

    Args:
        device: where models compute.
    """
    return {"machine": machine(device), "date": time.strftime("%Y-%m-%d"), "commit": commit()}


def machine(device: str) -> str:
    """Name of the GPU, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


@functools.cache
def commit() -> str:
    """The commit of the sources, with `+changes` if files of the checkout differ from it; "unknown" where none is."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else the sources only lie inside another project's checkout
        return git("rev-parse", "HEAD") + "+changes" * bool(git("status", "--porcelain", "-uno", "--", ":/*.py"))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ACTMAT_COMMIT", "unknown")


def write_origin(folder: Path, device: str) -> None:
    """Record in a folder where its content comes from."""
    (folder / _FILE).write_text(json.dumps(current_origin(device)) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin:
    """The record of a folder, or `UNKNOWN`."""
    path = folder / _FILE
    origin: Origin = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else UNKNOWN
    return origin


def join_origins(origins: Iterable[Origin]) -> dict[str, str]:
    """Origin of several things; values that differ stand side by side."""
    every = list(origins)
    return {name: ", ".join(dict.fromkeys(origin[name] for origin in every)) for name in UNKNOWN}
