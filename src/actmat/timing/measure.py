"""Measure the rates of this machine: matrix routines, elementwise operations, hashing, storage.

Everything is measured as a worker of a merge does it: on one thread, in the chunks and dtypes of a merge of bfloat16
checkpoints. Computing is timed by the thread's own clock, storage and accelerators by the wall clock.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.linalg import operations
from actmat.linalg.operations import Operation
from actmat.planning.regions import CHUNK
from actmat.system import read_at, write_at
from actmat.timing.rates import Compute, DeviceRates

__all__ = ["QUICK", "Effort", "busy_shares", "compute_rates", "device_rates", "entry_rates", "storage_rates"]


@dataclass(frozen=True, slots=True)
class Effort:
    """Amount of measuring; the defaults take a minute on a usual machine.

    Args:
        sizes: sides of the matrices that are multiplied and factorised.
        spectral: sides of those that are decomposed, which takes longer.
        file_bytes: size of the file that is written and read.
        least_s: every rate is measured for so long at least.
    """

    sizes: tuple[int, ...] = (128, 512, 2048)
    spectral: tuple[int, ...] = (256, 768, 2048)
    file_bytes: int = 1 << 29
    least_s: float = 0.2


QUICK = Effort(sizes=(64, 256), spectral=(64, 192), file_bytes=1 << 24, least_s=0.01)
"""A few seconds: rough, for a first look."""

Routine = tuple[str, Callable[[int], Operation], Callable[[Tensor, Tensor], object]]
"""Class of operations, its count for a side, and the call for a square matrix and a positive definite one."""

ROUTINES: tuple[Routine, ...] = (
    ("product", lambda n: operations.product(n, n, n), lambda a, s: a @ s),
    ("cholesky", lambda n: operations.cholesky(n), lambda a, s: torch.linalg.cholesky_ex(s)),
    ("eigh", lambda n: operations.eigh(n), lambda a, s: torch.linalg.eigh(s)),
    ("svd", lambda n: operations.svd(n, n), lambda a, s: torch.linalg.svd(a, full_matrices=False)),
)


def compute_rates(effort: Effort, note: Callable[[str], None], device: str = "cpu") -> Compute:
    """Rates of the matrix routines, per class, dtype and size.

    Args:
        note: is told what is measured next.
        device: where.
    """
    found: dict[str, tuple[tuple[int, float], ...]] = {}
    for kind, count, call in ROUTINES:
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            note(f"{kind} in {name}")
            rates = []
            for size in effort.sizes if kind in ("product", "cholesky") else effort.spectral:
                if kind in ("eigh", "svd") and name == "float32" and size == max(effort.spectral) and size > 1024:
                    continue  # merges decompose in float64; the smaller sizes tell enough
                a_NN, spd_NN = _matrices(size, torch.float32 if device == "mps" else dtype, device)
                took = _seconds(partial(call, a_NN, spd_NN), effort.least_s, device)
                rates.append((size, count(size).flops / took))
            found[f"{kind} {name}"] = tuple(rates)
    return found


def device_rates(effort: Effort, note: Callable[[str], None], kind: str) -> DeviceRates:
    """Rates of the first accelerator of a kind ("cuda", "mps"); one without float64 has the rates of float32 there."""
    name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
    left, right = (torch.randn(1 << 24, device=kind) for _ in range(2))
    host = torch.randn(1 << 24, pin_memory=kind == "cuda")
    entry = left.numel() / _seconds(lambda: left.add_(right, alpha=1e-3), effort.least_s, kind)
    transfer = 4 * host.numel() / _seconds(lambda: right.copy_(host), effort.least_s, kind)
    return DeviceRates(name, compute_rates(effort, note, kind), entry, transfer)


def entry_rates(effort: Effort) -> dict[str, float]:
    """Entries per second of a pass, of a delta and of the output; bytes per second of hashing."""
    rng = torch.Generator().manual_seed(0)
    base, expert = (torch.randn(CHUNK, generator=rng).bfloat16() for _ in range(2))
    wide, delta, out, cast = base.float(), torch.empty(CHUNK), torch.empty(CHUNK), torch.empty_like(base)

    def one_delta() -> None:
        torch.sub(delta.copy_(expert), wide, out=delta)
        float(delta.sum())

    def output() -> None:
        wide.copy_(base)
        torch.add(wide, delta, alpha=0.5, out=out)
        float(cast.copy_(out).sum())

    rates = {
        "entry": CHUNK / _seconds(lambda: out.add_(delta, alpha=1e-3), effort.least_s),
        "delta": CHUNK / _seconds(one_delta, effort.least_s),
        "output": CHUNK / _seconds(output, effort.least_s),
    }
    content = ContentHash()
    return rates | {"hash": 2 * CHUNK / _seconds(lambda: content.update(raw_bytes(cast)), effort.least_s)}


def busy_shares(effort: Effort, cores: int) -> dict[str, float]:
    """Share of its rate that a core keeps while all of them compute: products, and elementwise operations."""
    if cores == 1:
        return {"matrix": 1.0, "entry": 1.0}
    size = max(s for s in effort.sizes if s <= 1024)
    matrices = [_matrices(size, torch.float32, "cpu") for _ in range(cores)]
    chunks = [(torch.randn(CHUNK), torch.randn(CHUNK)) for _ in range(cores)]
    products = [partial(torch.matmul, a, s) for a, s in matrices]
    passes = [partial(a.add_, b, alpha=1e-3) for a, b in chunks]
    return {"matrix": _share(products, effort.least_s), "entry": _share(passes, effort.least_s)}


def storage_rates(effort: Effort, folder: Path | None) -> dict[str, float]:
    """Bytes per second of writing (synced), of reading from storage and of reading what the system holds in memory."""
    block = memoryview(os.urandom(1 << 22))
    buffer = memoryview(bytearray(1 << 22))
    with tempfile.NamedTemporaryFile(dir=folder, prefix="actmat-calibrate-") as file:
        handle, blocks = file.fileno(), max(1, effort.file_bytes // len(block))

        def write() -> None:
            for k in range(blocks):
                write_at(handle, block, k * len(block))
            os.fsync(handle)

        def read() -> None:
            for k in range(blocks):
                read_at(handle, buffer, k * len(block))

        total = blocks * len(block)
        written = total / _once(write)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        cold = total / _once(read)
        return {"disk_write": written, "disk_read": cold, "cached_read": total / _once(read)}


def _matrices(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A random square matrix, and a symmetric positive definite one whose spectrum decays."""
    rng = torch.Generator().manual_seed(size)
    a_NN = torch.randn(size, size, generator=rng, dtype=dtype)
    rows_NN = a_NN / torch.arange(1, size + 1, dtype=dtype)
    spd_NN = rows_NN.mT @ rows_NN
    spd_NN.diagonal().add_(1e-3)
    return a_NN.to(device), spd_NN.to(device)


def _seconds(work: Callable[[], object], least_s: float, device: str = "cpu") -> float:
    """Median time of a call, of as many as fit into the time, three at least unless one takes very long.

    On the CPU it is the thread's own time, which other processes on the machine prolong least.
    """
    clock = time.thread_time if device == "cpu" else time.perf_counter

    def timed() -> float:
        began = clock()
        work()
        if device != "cpu":
            getattr(torch, device).synchronize()
        return max(clock() - began, 1e-9)

    times = [timed()]
    if times[0] > 5 * least_s:
        return times[0]
    times = []
    while len(times) < 3 or sum(times) < least_s:
        times.append(timed())
    return statistics.median(times)


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def _share(works: Sequence[Callable[[], object]], least_s: float) -> float:
    """Time of one call on its own over that of the same call while all run."""
    alone = _seconds(works[0], least_s)
    ready = threading.Barrier(len(works))

    def one(work: Callable[[], object]) -> float:
        ready.wait()
        return _seconds(work, 2 * least_s)

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        together = statistics.median(pool.map(one, works))
    return min(1.0, alone / together)
