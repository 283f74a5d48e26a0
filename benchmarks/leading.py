"""TSV keeps one in `T` directions of each of `T` experts: what would finding only these save?

    python -m benchmarks.leading
    python -m benchmarks.leading --spectra gaussian --experts 8 --repeats 1

`full` is one expert's decomposition as TSV makes it (`thin_svd`), `part` the leading eigenpairs of the same Gram matrix
from a Krylov basis (`linalg.krylov`) of `basis share` of the side, with their proof and the vectors of the long side;
`polar` what follows, the two polar factors of as many random directions as are kept. Processor seconds of one thread,
in turn, medians. TSV is `T` decompositions and the polar factors: `gain` is `(T full + polar) / (T part + polar)`. The
basis is given up at `--largest` of the side; `part` is then what the attempt took, and `full` on top of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.linalg import krylov
from actmat.linalg.inertia import none_above
from actmat.linalg.panels import multiply
from actmat.linalg.singular import orthogonalised_sum
from actmat.linalg.svd import row_gram, thin_svd
from benchmarks.common import markdown, torch_threads, write_result
from benchmarks.matrix import SPECTRA, make_deltas

COLUMNS = ("spectrum", "experts", "kept", "basis_share", "full_s", "part_s", "polar_s", "tsv_s", "with_parts_s", "gain")


@dataclass(frozen=True, slots=True)
class Largest:
    """So many of the largest eigenvalues."""

    count: int

    def of(self, values_J: Tensor) -> tuple[int, float]:
        """Number of these (descending) that are wanted, and the last of them."""
        count = min(self.count, len(values_J))
        return count, float(values_J[count - 1])


def part_of(delta_OI: Tensor, count: int, largest: float) -> tuple[float, bool]:
    """Find the leading triplets; returns the share of the side that the basis has, and whether they are proven."""
    sym_NN = row_gram(delta_OI)
    size, wanted = len(sym_NN), Largest(count)
    basis = krylov._Basis(sym_NN, int(largest * size) // krylov.BLOCK * krylov.BLOCK)
    look = round(krylov._expected(count))
    while True:
        basis.grow(look)
        ritz = basis.ritz()
        found, bound = wanted.of(ritz.values_J)
        tolerance = max(
            torch.finfo(delta_OI.dtype).eps * bound, torch.finfo(torch.float64).eps * float(ritz.values_J[0])
        )
        if (cut := krylov._cut(ritz, found, bound, tolerance)) is not None:
            break
        if basis.size == basis.limit:
            return basis.size / size, False
        look = round(1.1 * basis.size)
    taken, level = cut
    vectors_KN = multiply(ritz.coordinates_JJ[:, :taken].mT, basis.rows_JN[: basis.size])
    proven = none_above(sym_NN, ritz.values_J[:taken], vectors_KN, level)
    (vectors_KN[:count] / ritz.values_J[:count].sqrt().unsqueeze(-1)) @ delta_OI.double()
    return basis.size / size, proven


def _all_kept(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many directions as TSV has in all; the time of a polar factor depends on their number, about the side."""
    u, v = (torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    return u / size**0.5, torch.ones(size, dtype=torch.float64), v / size**0.5


def seconds(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median processor seconds of a call, and what it gives."""
    took, found = [], None
    for _ in range(repeats):
        began = time.thread_time()
        found = work()
        took.append(time.thread_time() - began)
    return statistics.median(took), found


def rows_of(spectrum: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of experts."""
    (delta_OI,) = make_deltas(1, given.size, given.size, spectrum)
    polar_s, _ = seconds(lambda: orthogonalised_sum(*_all_kept(given.size), torch.float32), given.repeats)
    rows = []
    for experts in given.experts:
        count = given.size // experts
        full_s, _ = seconds(lambda count=count: thin_svd(delta_OI, k=count), given.repeats)
        part_s, (share, proven) = seconds(lambda count=count: part_of(delta_OI, count, given.largest), given.repeats)
        part_s += 0 if proven else full_s
        whole, with_parts = experts * full_s + polar_s, experts * part_s + polar_s
        row = {"spectrum": spectrum, "experts": experts, "kept": count, "basis_share": share}
        row |= {"proven": proven, "full_s": full_s, "part_s": part_s, "polar_s": polar_s}
        rows.append(row | {"tsv_s": whole, "with_parts_s": with_parts, "gain": whole / with_parts})
        print(markdown([rows[-1]], COLUMNS).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    """Measure every spectrum and number of experts; write benchmarks/results/leading.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="side of the matrices")
    parser.add_argument("--spectra", nargs="+", choices=SPECTRA, default=["power0.7", "gaussian"])
    parser.add_argument("--experts", nargs="+", type=int, default=[3, 5, 8])
    parser.add_argument("--largest", type=float, default=0.6, help="share of the side at which a basis is given up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="leading", help="name of the result file")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with torch_threads(1), torch.no_grad():
        rows = [row for spectrum in given.spectra for row in rows_of(spectrum, given)]
    print(write_result(given.name, rows, load_before=load, columns=COLUMNS))


if __name__ == "__main__":
    main()
