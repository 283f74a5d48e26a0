"""How well does a first look predict the Krylov basis that leading directions take?

    python -m benchmarks.basis_size
    python -m benchmarks.basis_size --size 1024 --shares 0.04 0.125

Diagonal matrices with the eigenvalues of `spectrum` (the start is random, so that a rotation changes nothing). For each
share of leading pairs: the basis that `linalg.krylov.basis_for` expects after the first look and the one that the block
iteration took, as shares of the side, the latter on a grid of two blocks. `ratio` is taken over expected; both are
empty where more than `--largest` of the side was not enough. `look_s` is the first look with its prediction, `full_s` a
whole decomposition: processor seconds of one thread.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
from torch import Tensor

from actmat.linalg import krylov
from actmat.linalg.krylov import basis_for, quantile
from actmat.linalg.lapack import eigh
from benchmarks.common import markdown, torch_threads, write_result

COLUMNS = ("spectrum", "share", "expected", "taken", "ratio", "look_s", "full_s")
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def spectra(size: int) -> dict[str, Tensor]:
    """Eigenvalues, descending: power laws of the singular values, an exponential, random and flat ones."""
    index = torch.arange(1, size + 1, dtype=torch.float64)
    random = torch.randn(size // 2, size // 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = torch.linalg.eigvalsh(random @ random.mT).flip(0)
    gaussian = torch.nn.functional.interpolate(half[None, None], size=size, mode="linear")[0, 0]
    found = {f"power{p:g}": index.pow(-2 * p) for p in (0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.5)}
    found |= {"gaussian": gaussian, "power0.5 on a flat rest": 1 / index + 0.01 * gaussian / gaussian[0]}
    return found | {"exponential": torch.exp(-20 * index / size), "line": 1 - (index - 1) / size}


def whole_seconds(size: int) -> float:
    """Processor seconds of a whole decomposition; of a random matrix, since a diagonal one is decomposed already."""
    random = torch.randn(size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sym_NN = random @ random.mT
    began = time.thread_time()
    eigh(sym_NN)
    return time.thread_time() - began


def rows_of(name: str, values_N: Tensor, shares: list[float], largest: float, full_s: float) -> list[dict[str, Any]]:
    """One spectrum: predictions from one look, then one growing basis for all shares."""
    size, sym_NN = len(values_N), torch.diag(values_N)
    began = time.thread_time()
    basis = krylov._Basis(sym_NN, int(largest * size) // krylov.BLOCK * krylov.BLOCK)
    basis.grow(krylov.FIRST_LOOK * krylov.BLOCK)
    look = basis.ritz()
    rows: list[dict[str, Any]] = []
    for share in shares:
        count = int(share * size)
        tolerance = max(EPS32 * quantile(look.values_J, look.counts_J, count), EPS64 * float(look.values_J[0]))
        expected = basis_for(look.values_J, look.counts_J, count, tolerance, krylov.BLOCK, size)
        row = {"spectrum": name, "share": share}
        rows.append(row | ({"expected": expected / size} if math.isfinite(expected) else {}))
    took = time.thread_time() - began
    while basis.size < basis.limit and any("taken" not in row for row in rows):
        basis.grow(basis.size + 2 * krylov.BLOCK)
        ritz = basis.ritz()
        for row in rows:
            count = int(row["share"] * size)
            bound = float(ritz.values_J[count - 1]) if count < basis.size else math.inf
            tolerance = max(EPS32 * bound, EPS64 * float(ritz.values_J[0]))
            exact = count < basis.size and float(ritz.residuals_J[:count].max()) <= tolerance
            if "taken" not in row and exact:
                row["taken"] = basis.size / size
    for row in rows:
        row |= {"look_s": took, "full_s": full_s}
        if "taken" in row and "expected" in row:
            row["ratio"] = row["taken"] / row["expected"]
        print(markdown([row], COLUMNS).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    """Measure every spectrum and share; write benchmarks/results/basis_size.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.08, 0.125], help="of the pairs that are wanted")
    parser.add_argument("--largest", type=float, default=0.66, help="share of the side up to which a basis is grown")
    parser.add_argument("--name", default="basis_size", help="name of the result file")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with torch_threads(1), torch.no_grad():
        full_s = whole_seconds(given.size)
        found = [rows_of(n, v, given.shares, given.largest, full_s) for n, v in spectra(given.size).items()]
    print(write_result(given.name, [row for rows in found for row in rows], load_before=load, columns=COLUMNS))


if __name__ == "__main__":
    main()
