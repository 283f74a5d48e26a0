"""CART, TSV and Iso-CTS keep the leading directions of every expert: what does computing only these save?

    python -m benchmarks.leading
    python -m benchmarks.leading --methods cart --spectra power0.5 gaussian --repeats 3

`part` is a merge as it is made, `full` the same with every matrix decomposed whole: processor seconds of one thread, in
turn, medians. `basis share` is the largest Krylov basis over the short side; where it is missing, no part was computed
(the reason is in the result file), and `part` is what that costs. `apart` is the distance of the two answers, relative
to their norm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from actmat.linalg import svd
from actmat.methods import get_method
from benchmarks.common import markdown, torch_threads, write_result
from benchmarks.matrix import make_deltas

COLUMNS = ("method", "shape", "spectrum", "experts", "basis_share", "part_s", "full_s", "times_faster", "apart")
CASES = (("cart", 3), ("iso_cts", 3), ("tsv", 3), ("tsv", 8), ("tsv", 16))
"""Methods, and numbers of experts."""


def merged(method: str, deltas: Sequence[Tensor]) -> tuple[float, Any]:
    """Processor seconds of a merge, and what it gives."""
    began = time.thread_time()
    found = get_method(method).merge(deltas)
    return time.thread_time() - began, found


def row_of(method: str, experts: int, shape: tuple[int, int], spectrum: str, repeats: int) -> dict[str, Any]:
    """Both ways in turn on one matrix."""
    deltas = make_deltas(experts, *shape, spectrum)
    part, full = [], []
    for _ in range(repeats):
        took, found = merged(method, deltas)
        part.append(took)
        with mock.patch.object(svd, "SMALLEST", max(shape) + 1):
            took, whole = merged(method, deltas)
        full.append(took)
    apart = torch.linalg.vector_norm(found.value - whole.value) / torch.linalg.vector_norm(whole.value)
    of = {"part": statistics.median(part), "full": statistics.median(full)}
    row: dict[str, Any] = {"method": method, "shape": f"{shape[0]} x {shape[1]}", "spectrum": spectrum}
    row |= {"experts": experts, "refused": found.stats.get("no_lanczos", "")}
    row |= {"basis_share": found.stats["basis"] / min(shape)} if "basis" in found.stats else {}
    row |= {"part_s": of["part"], "full_s": of["full"], "times_faster": of["full"] / of["part"]}
    row |= {"apart": float(apart), "all_s": {"part": part, "full": full}}
    print(markdown([row], COLUMNS).splitlines()[-1], flush=True)
    return row


def main() -> None:
    """Measure every case; write benchmarks/results/leading.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spectra", nargs="+", default=["power0.5", "power0.7", "gaussian", "lowrank"])
    parser.add_argument("--shape", nargs=2, type=int, default=(2048, 2048), metavar=("O", "I"))
    parser.add_argument("--methods", nargs="+", default=sorted({method for method, _ in CASES}))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--name", default="leading", help="name of the result file")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with torch_threads(1), torch.no_grad():
        rows = [
            row_of(method, experts, tuple(given.shape), spectrum, given.repeats)
            for method, experts in CASES
            if method in given.methods
            for spectrum in given.spectra
        ]
    print(write_result(given.name, rows, load_before=load, columns=COLUMNS))


if __name__ == "__main__":
    main()
