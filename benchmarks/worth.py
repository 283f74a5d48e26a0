"""From which share of the directions on is the whole spectrum faster than a part of it?

    python -m benchmarks.worth
    python -m benchmarks.worth --sizes 2048 4096 --kept 0.1 0.2

Symmetric matrices with eigenvalues `i^-2p`, `p` such that the cut-off of `actmat` keeps the given share of them. *part*
is `krylov.leading` with no limit on its basis, proof included, *full* the whole decomposition: processor seconds of one
thread, in turn, medians. `basis share` is the size of the basis over the side. Today a basis is grown where it is
expected to have at most `krylov.WORTH` of the side: `decided` is what a merge does, `lost` the time that the other way
would have saved, over the time of the faster one.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from actmat.linalg import krylov
from actmat.linalg.lapack import eigh
from benchmarks.common import markdown, torch_threads, write_result
from benchmarks.matrix import EPS32

COLUMNS = ("size", "kept", "basis_share", "part_s", "full_s", "times_faster", "decided", "lost")


def matrix(size: int, kept: int) -> torch.Tensor:
    """A float32 matrix, widened, with so many eigenvalues above the cut-off."""
    power = -math.log(size * EPS32) / math.log(kept + 0.5)
    values_N = torch.arange(1, size + 1, dtype=torch.float64).pow(-power)
    basis_NN = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(size))).Q.double()
    sym_NN = ((basis_NN * values_N) @ basis_NN.mT).float().double()
    return (sym_NN + sym_NN.mT) / 2


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and what it gives."""
    began = time.thread_time()
    found = work()
    return time.thread_time() - began, found


def row_of(size: int, share: float, repeats: int) -> dict[str, Any]:
    """Both ways in turn on one matrix."""
    sym_NN, above = matrix(size, round(share * size)), krylov.Above(size * EPS32)
    decided = "full" if isinstance(krylov.leading(sym_NN, above, torch.float32), str) else "part"
    part, full, found = [], [], None
    for _ in range(repeats):
        with mock.patch.multiple(krylov, WORTH=1.0, LIMIT=1.0):
            took, found = seconds(lambda: krylov.leading(sym_NN, above, torch.float32))
        part.append(took)
        full.append(seconds(lambda: eigh(sym_NN))[0])
    assert isinstance(found, krylov.Leading), found
    of = {"part": statistics.median(part), "full": statistics.median(full)}
    row: dict[str, Any] = {"size": size, "kept": len(found.values_K), "basis_share": found.basis / size}
    row |= {"part_s": of["part"], "full_s": of["full"], "times_faster": of["full"] / of["part"], "decided": decided}
    row |= {"lost": of[decided] / min(of.values()) - 1, "all_s": {"part": part, "full": full}}
    print(markdown([row], COLUMNS).splitlines()[-1], flush=True)
    return row


def main() -> None:
    """Measure every size and share; write benchmarks/results/worth.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2048])
    parser.add_argument("--kept", nargs="+", type=float, default=[0.05, 0.1, 0.15, 0.2, 0.25, 0.3], help="shares")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="worth", help="name of the result file")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with torch_threads(1), torch.no_grad():
        rows = [row_of(size, share, given.repeats) for size in given.sizes for share in given.kept]
    print(write_result(given.name, rows, load_before=load, worth=krylov.WORTH, columns=COLUMNS))


if __name__ == "__main__":
    main()
