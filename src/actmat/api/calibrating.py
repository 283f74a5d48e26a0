"""`calibrate`: measure this machine, for predicted times."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from actmat.system import load_average, usable_cores
from actmat.timing.measure import Effort, busy_shares, compute_rates, device_rates, entry_rates, storage_rates
from actmat.timing.rates import HostRates, Rates
from actmat.version import __version__

__all__ = ["calibrate"]

SMALL = (20, 220)
"""Tensors of two merges that tell what a tensor costs besides its bytes, and what a merge costs besides its tensors."""


def calibrate(
    effort: Effort | None = None, *, folder: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> Rates:
    """Rates of this machine, measured in about a minute; nothing else should run at the time.

    Args:
        effort: how much is measured.
        folder: on the file system to be measured; default: the one of temporary files.
        note: is told what is measured next.

    Raises:
        OSError: the folder cannot be written to.
    """
    import torch

    from actmat.engine.resources import one_thread

    effort, cores, load = effort or Effort(), usable_cores(), round(load_average(), 2)
    with one_thread(), torch.no_grad():
        compute = compute_rates(effort, note)
        note("elementwise operations and hashing")
        entries = entry_rates(effort)
        note("all cores at the same time")
        busy = busy_shares(effort, cores)
        note("storage")
        storage = storage_rates(effort, folder)
    kinds = [k for k, module in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if module.is_available()]
    devices = {kind: device_rates(effort, note, kind) for kind in kinds}
    note("start and small tensors")
    tensor_s, merge_s = _small_merges()
    return Rates(
        host=platform.node(),
        processor=_processor(),
        cores=cores,
        date=datetime.date.today().isoformat(),
        versions={"actmat": __version__, "torch": torch.__version__, "python": platform.python_version()},
        load=load,
        rates=HostRates(
            compute=compute, **entries, **storage, tensor_s=tensor_s, start_s=merge_s + _start_s(), busy=busy
        ),
        devices=devices,
    )


def _small_merges() -> tuple[float, float]:
    """Seconds per tensor, and of a whole merge besides its tensors, of merges without entries to speak of."""
    import torch
    from safetensors.torch import save_file

    from actmat.api.merging import merge

    def seconds(count: int) -> float:
        with tempfile.TemporaryDirectory(prefix="actmat-calibrate-") as name:
            root = Path(name)
            tensors = {f"model.layers.{k}.mlp.up_proj.weight": torch.ones(4, 4) for k in range(count)}
            for part, change in (("base", 0.0), ("one", 0.1), ("two", 0.2)):
                (root / part).mkdir()
                shifted = {n: t + change for n, t in tensors.items()}
                save_file(shifted, root / part / "model.safetensors", {"format": "pt"})
            began = time.process_time()
            merge(root / "base", [root / "one", root / "two"], out=root / "out", method="average", threads=1)
            return time.process_time() - began

    seconds(2)  # imports
    few, many = (statistics.median(seconds(n) for _ in range(3)) for n in SMALL)
    each = max(0.0, many - few) / (SMALL[1] - SMALL[0])
    return each, max(0.0, few - each * SMALL[0])


def _start_s() -> float:
    """Seconds of computing until a process of the command line can begin to merge."""
    path = os.pathsep.join(p for p in sys.path if p)
    code = "import actmat.run, torch, time; print(time.process_time())"
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    return float(told.stdout)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
