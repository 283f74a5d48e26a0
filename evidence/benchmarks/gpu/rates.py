"""Rates of the device, its links and the disk."""

from __future__ import annotations

import os
import platform
import shutil
from functools import partial

import torch

from benchmarks.common import GIB, disk_rates, eigh_time, matmul_rate
from benchmarks.gpu.rows import arguments, give, seconds_of, torch_device


def main() -> None:
    """Print the rates."""
    given = arguments()
    there = torch_device(given.device)
    size, copied = (512, 1 << 22) if given.quick else (8192, GIB)
    give(fact="device", value=torch.cuda.get_device_name(there) if there.type == "cuda" else "simulated")
    for fact, value in (
        ("torch", torch.__version__), ("cuda", torch.version.cuda), ("python", platform.python_version()),
        ("cores", os.cpu_count()), ("free disk, GiB", round(shutil.disk_usage(given.folder).free / GIB, 1)),
    ):  # fmt: skip
        give(fact=fact, value=value)
    for dtype, name in ((torch.float32, "f32"), (torch.float64, "f64")):
        a = torch.randn(size, size, dtype=dtype, device=there)
        give(fact=f"product {size} {name}, TFLOP/s", value=2e-12 * size**3 / seconds_of(lambda a=a: a @ a, there))  # type: ignore[misc]
    side = size // 2
    gram = (lambda a: a @ a.mT)(torch.randn(side, side, dtype=torch.float64, device=there))
    give(fact=f"eigh {side} f64, s", value=seconds_of(lambda: torch.linalg.eigh(gram), there, 1))
    give(fact=f"cholesky {side} f64, s", value=seconds_of(lambda: torch.linalg.cholesky(gram), there))
    host = torch.ones(copied, dtype=torch.uint8)
    sent = host.to(there, copy=True)
    pinned = host.pin_memory() if there.type == "cuda" else host
    for name, target, source in (
        ("copy to the device", sent, host), ("copy to the host", host, sent),
        ("pinned copy to the device", sent, pinned),
    ):  # fmt: skip
        rate = copied * 1e-9 / seconds_of(partial(target.copy_, source), there)
        give(fact=f"{name}, GB/s", value=rate)
    for fact, rate in disk_rates(given.folder, copied).items():
        give(fact=fact, value=rate)
    give(fact="host, one thread: product f32, TFLOP/s", value=1e-12 * matmul_rate(size // 4, torch.float32, 1))
    give(fact="host, one thread: eigh 1024 f64, s", value=eigh_time(1024, torch.float64, 1))


if __name__ == "__main__":
    main()
