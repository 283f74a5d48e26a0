"""The default path against what cannot be avoided: `actmat_ridge` and `actmat` on the matrices of 1.1 B and 7 B models.

    python -m benchmarks.floor                 # the table of docs/performance.md: about twelve minutes of one core
    python -m benchmarks.floor --all           # also the wide and tall matrices of a 7 B model, and more experts
    python -m benchmarks.floor --only 2048x5632
    python -m benchmarks.floor --adapters      # the methods that `auto` takes for adapters, on factors: a minute

One thread, processor time. The floor of a row is a sum of single calls of torch on the same shapes, each measured in
the same process, so that it needs no rate from elsewhere. Calls of the method and of the floor's operations take turns,
in two to five rounds, and the fastest of each count: a slower minute of the machine meets both.

* every expert: `D^T D` at half of the time of the full product (it is symmetric), `D (D^T D)`, one addition of a Gram
  matrix. Where the rows of all experts are fewer than the columns: half of `A A^T` of all rows, and `D A^T` out of it.
  Where twice the rows are fewer than the columns, `(D D^T) D`. The cheapest of these.
* `actmat_ridge`: a Cholesky factorization in float32, and its solve for all rows.
* `actmat` keeps K of N directions. K = N: a Cholesky factorization in float64 with its solve. Else the cheapest of: one
  `eigh` in float64; the K kept directions; the N - K others and the factorization. M directions cost one product of the
  matrix with M vectors, making them orthonormal (`2 N M^2` operations) and an `eigh` of side M, all in float64: less
  than any method that must find them. Then the kept directions are applied.

* `dc_merge` on whole deltas: of every expert a Gram matrix of the short side, the cheaper of its `eigh` and of its K
  leading directions, and the product that makes the other vectors; two polar factors of all J = T K vectors by their
  Gram matrices; a core per expert; the products of the result. All in float64.
* adapters, of R ranks together: the Gram matrices of both sides, whole (torch has no symmetric product that is cheaper
  at this size), an SVD of every expert's rank, two polar factors of all kept directions by their SVDs, and one product
  with each side. All in float64; *float32* is the same floor with everything in float32.

The memory of these sums and of the result is written once. Solves are the cheaper of triangular solves and an inverse
with a product. `eigh` above a side of 2048 is scaled with the cube of the side. Other passes over the deltas (norms,
copies) are no part of the floor.

*peak*: largest sum of live allocations in a call, the result and LAPACK's work included, without the deltas; *planned*:
the workspace that the method declares. What the linear algebra library keeps for itself is a constant of every plan.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.methods.facets import Merged
from benchmarks.common import program, torch_threads, write_result

COLUMNS = ("model", "shape", "experts", "spectrum", "method", "solver", "kept", "cpu_s", "floor_s", "times_floor",
           "peak_b", "planned_b")  # fmt: skip
METHODS = ("actmat_ridge", "actmat", "dc_merge")
OF_ADAPTERS = ("ct_merging", "dc_merge")
COLUMNS_OF_ADAPTERS = ("model", "shape", "experts", "rank", "method", "cpu_s", "floor_s", "times_floor", "float32_s")
ADAPTERS = (("1.1 B", (2048, 2048)), ("1.1 B", (5632, 2048)), ("7 B", (4096, 11008)))
SPECTRA = ("flat", "power", "low rank")
LARGEST_EIGH = 2048
MOST_CALLS = 5
FEWEST_ROUNDS, ENOUGH_S = 2, 3.0
"""Rounds end when the calls of the method have taken so long together, or with `MOST_CALLS`."""

ROWS: dict[str, tuple[tuple[tuple[int, int], tuple[int, ...], tuple[str, ...]], ...]] = {
    "1.1 B": (
        ((2048, 2048), (2, 8), SPECTRA),
        ((256, 2048), (3,), ("flat",)),
        ((5632, 2048), (3,), ("flat", "power")),
        ((2048, 5632), (2, 3, 6), ("flat",)),
        ((2048, 5632), (3,), ("power", "low rank")),
        ((32000, 2048), (2,), ("flat",)),
    ),
    "7 B": (((4096, 4096), (3,), ("flat", "power")),),
}
"""Model -> shape O x I, numbers of experts, spectra."""
MORE: dict[str, tuple[tuple[tuple[int, int], tuple[int, ...], tuple[str, ...]], ...]] = {
    "1.1 B": (((152000, 2048), (2,), ("flat",)), ((256, 2048), (8,), ("flat",))),
    "7 B": (((11008, 4096), (2,), ("flat",)), ((4096, 11008), (2, 3), ("flat",)), ((4096, 4096), (8,), ("power",))),
}


def make_delta(shape: tuple[int, int], spectrum: str, seed: int) -> Tensor:
    """Random, about 1e-2 per entry: entries independent; singular values near `k^-1`; a sixteenth of the directions."""
    generator = torch.Generator().manual_seed(seed)
    if spectrum == "flat":
        return torch.randn(shape, generator=generator) * 1e-2
    rank = min(shape) if spectrum == "power" else max(1, min(shape) // 16)
    left, right = (torch.randn(*s, generator=generator) for s in ((shape[0], rank), (rank, shape[1])))
    falls = torch.arange(1, rank + 1) ** -1.0 if spectrum == "power" else torch.full((rank,), rank**-0.5)
    return (left * (falls * 1e-2 / torch.linalg.vector_norm(falls))) @ right


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest sum of live allocations of torch inside `function`, LAPACK's work space included."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:  # torch.profiler imports the compiler
        function()
    assert profile.kineto_results is not None
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(sizes), default=0)


def cpu_seconds(work: Callable[[], object], enough_s: float = 0.2) -> float:
    """Processor time of the fastest of up to five calls, which together take about `enough_s`."""
    times: list[float] = []
    while not times or (sum(times) < enough_s and len(times) < MOST_CALLS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


# Single operations, each measured once per shape and round; only `eigh`, once per size


@cache
def product(rows: int, columns: int, inner: int, dtype: torch.dtype = torch.float32) -> float:
    """Seconds of a product `rows x inner` by `inner x columns`."""
    if dtype == torch.float64 and rows * columns * inner > 1 << 31:  # rates no longer depend on such sizes
        share = (1 << 31) / (rows * columns * inner)
        return product(rows, columns, max(1, int(inner * share)), dtype) / share
    left, right, out = torch.rand(rows, inner, dtype=dtype), torch.rand(inner, columns, dtype=dtype), None
    out = torch.zeros(rows, columns, dtype=dtype)
    return cpu_seconds(lambda: torch.mm(left, right, out=out))


@cache
def gram(rows: int, width: int) -> float:
    """Seconds of a symmetric product of `rows x width` entries with themselves: half of the full one."""
    factor, out = torch.rand(rows, width), torch.zeros(width, width)
    return cpu_seconds(lambda: torch.mm(factor.mT, factor, out=out)) / 2


@cache
def addition(width: int) -> float:
    """Seconds of the sum of two square matrices, in place."""
    one, other = torch.ones(width, width), torch.ones(width, width)
    return cpu_seconds(lambda: one.add_(other))


@cache
def touch(count: int) -> float:
    """Seconds of the first write to memory for so many entries."""
    return cpu_seconds(lambda: torch.zeros(count).fill_(1))


@cache
def definite(size: int, dtype: torch.dtype) -> Tensor:
    """A well-conditioned definite matrix."""
    return torch.eye(size, dtype=dtype) + 0.5 / size


@cache
def cholesky(size: int, dtype: torch.dtype) -> float:
    """Seconds of one factorization."""
    return cpu_seconds(lambda: torch.linalg.cholesky_ex(definite(size, dtype)))


@cache
def solve(size: int, rows: int, dtype: torch.dtype) -> float:
    """Seconds of applying the inverse of a factorized matrix to so many rows."""
    factor = torch.linalg.cholesky(definite(size, dtype))
    right = torch.rand(min(rows, size), size, dtype=dtype)
    by_triangles = cpu_seconds(lambda: torch.cholesky_solve(right.mT, factor)) * rows / len(right)
    return min(by_triangles, cpu_seconds(lambda: torch.cholesky_inverse(factor)) + product(rows, size, size))


@cache
def eigh(size: int) -> float:
    """Seconds of one symmetric eigendecomposition in float64."""
    if size > LARGEST_EIGH:
        return eigh(LARGEST_EIGH) * (size / LARGEST_EIGH) ** 3
    matrix = torch.rand(size, size, dtype=torch.float64)
    return cpu_seconds(lambda: torch.linalg.eigh(matrix @ matrix.mT))


@cache
def svd(size: int, dtype: torch.dtype) -> float:
    """Seconds of one singular value decomposition of a square matrix."""
    matrix = torch.rand(size, size, dtype=dtype)
    return cpu_seconds(lambda: torch.linalg.svd(matrix, full_matrices=False))


# The floor


def moments(rows: int, width: int, experts: int) -> dict[str, float]:
    """Seconds until `S` and `B` are known, by form."""
    found = {"primal": experts * (gram(rows, width) + product(rows, width, width) + addition(width))}
    if 2 * rows < width:
        by_rows = gram(width, rows) + product(rows, width, rows)
        found["primal"] = min(found["primal"], experts * (gram(rows, width) + by_rows))
    if experts * rows < width:
        found["dual"] = gram(width, experts * rows)
    return found


def directions(size: int, count: int) -> float:
    """Seconds without which no method finds so many eigenvectors."""
    wide = torch.float64
    return product(size, count, size, wide) + product(size, count, count, wide) + eigh(count) if count else 0.0


def spectral(size: int, kept: int, rows: int) -> float:
    """Seconds of the spectral part of `actmat`, and of its application to all rows."""
    wide = torch.float64
    factorized = cholesky(size, wide) + solve(size, rows, wide)
    if kept == size:
        return factorized
    applied = 2 * product(rows, kept, size)
    return min(min(eigh(size), directions(size, kept)) + applied, factorized + directions(size, size - kept))


def merged_cores(shape: tuple[int, int], experts: int) -> float:
    """Seconds of `dc_merge` on whole deltas."""
    wide, (short, long) = torch.float64, sorted(shape)
    kept = short // experts
    joint = kept * experts
    spectrum = product(short, short, long, wide) / 2 + min(eigh(short), directions(short, kept))
    parts = experts * (spectrum + product(long, kept, short, wide))
    polar = sum(1.5 * product(side, joint, joint, wide) + eigh(joint) for side in shape)
    cores = experts * (sum(product(joint, kept, side, wide) for side in shape) + product(joint, joint, kept, wide))
    return parts + polar + cores + product(shape[0], joint, kept, wide) + product(*shape, joint, wide)


def factors_seconds(
    shape: tuple[int, int], experts: int, rank: int, method: str, dtype: torch.dtype = torch.float64
) -> float:
    """Seconds of a merge of adapters in the space of their ranks."""
    total = experts * rank
    kept = min(total, experts * 16 + 4) if method == "ct_merging" else total
    sides = sum(product(total, total, side, dtype) + product(side, total, total, dtype) for side in shape)
    return sides + experts * svd(rank, dtype) + 2 * svd(kept, dtype)


def floor_seconds(shape: tuple[int, int], experts: int, method: str, kept: int) -> float:
    """Seconds of the cheapest way; `kept` as recorded."""
    if method == "dc_merge":
        return merged_cores(shape, experts)
    rows, width = shape
    ways = []
    for form, seconds in moments(rows, width, experts).items():
        size = width if form == "primal" else experts * rows
        if method == "actmat_ridge":
            seconds += cholesky(size, torch.float32) + solve(size, rows, torch.float32)
        else:
            seconds += spectral(size, min(kept, size), rows)
        if form == "dual":
            seconds += product(rows, width, size) + touch(size * width + rows * size)
        ways.append(seconds + touch(size * size + rows * width))
    return min(ways)


# Rows


def fastest(merge: Callable[[], object], floor_of: Callable[[], float]) -> tuple[float, float]:
    """Smallest seconds of a merge and of its floor, which take turns."""
    spent = floor = math.inf
    for number in range(1, MOST_CALLS + 1):
        spent = min(spent, cpu_seconds(merge))
        for operation in (product, gram, addition, touch, cholesky, solve, svd):
            operation.cache_clear()
        floor = min(floor, floor_of())
        if number >= FEWEST_ROUNDS and number * spent > ENOUGH_S:
            break
    return spent, floor


def benchmark_adapters(model: str, shape: tuple[int, int], experts: int, rank: int, method: str) -> dict[str, Any]:
    """One row of adapters."""
    rule = get_method(method)
    assert rule.lowrank is not None
    merge, options = rule.lowrank.merge, rule.resolve_options({})
    rng = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=rng)
    deltas = [LowRank(normal(shape[0], rank) * 1e-2, normal(rank, shape[1])) for _ in range(experts)]
    spent, floor = fastest(lambda: merge(deltas, **options), lambda: factors_seconds(shape, experts, rank, method))
    row = {"model": model, "shape": f"{shape[0]}x{shape[1]}", "experts": experts, "rank": rank, "method": method,
           "cpu_s": spent, "floor_s": floor, "times_floor": spent / floor,
           "float32_s": factors_seconds(shape, experts, rank, method, torch.float32)}  # fmt: skip
    print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), flush=True)
    return row


def benchmark(model: str, shape: tuple[int, int], experts: int, spectrum: str, method: str) -> dict[str, Any]:
    """One row."""
    rule = get_method(method)
    deltas = [make_delta(shape, spectrum, seed) for seed in range(experts)]
    answers: list[Merged] = []
    peak = peak_bytes(lambda: answers.append(rule.merge(deltas)))
    stats = answers.pop().stats
    kept = int(stats.get("rank", min(shape[1], experts * shape[0])))
    spent, floor = fastest(lambda: rule.merge(deltas), lambda: floor_seconds(shape, experts, method, kept))
    planned = 4 * rule.cost.workspace(shape, experts, rule.resolve_options({}))
    row = {
        "model": model, "shape": f"{shape[0]}x{shape[1]}", "experts": experts, "spectrum": spectrum, "method": method,
        "solver": stats.get("solver", ""), "kept": kept, "cpu_s": spent, "floor_s": floor, "times_floor": spent / floor,
        "peak_b": peak, "planned_b": planned,
    }  # fmt: skip
    print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), flush=True)
    return row


def cases(given: argparse.Namespace) -> Iterator[tuple[str, tuple[int, int], int, str, str]]:
    """The rows that are asked for."""
    for table in (ROWS, MORE) if given.all or given.only else (ROWS,):
        for model, rows in table.items():
            for shape, experts, spectra in rows:
                if not given.only or f"{shape[0]}x{shape[1]}" in given.only:
                    for of in itertools.product(experts, spectra, given.methods):
                        yield model, shape, *of


def main() -> None:
    """Command line."""
    parser = program(__doc__, "floor")
    parser.add_argument("--all", action="store_true", help="also the rows that take long")
    parser.add_argument("--only", nargs="+", default=[], help="shapes such as 2048x5632")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--adapters", action="store_true", help="adapters, into floor-adapters")
    given = parser.parse_args()
    with torch_threads(1):
        rows: list[dict[str, Any]] = []
        if given.adapters:
            rows = [
                benchmark_adapters(*of, experts, rank, method)
                for of, experts, rank, method in itertools.product(ADAPTERS, (2, 3, 8), (8, 16, 64), OF_ADAPTERS)
            ]
            write_result("floor-adapters", rows, columns=COLUMNS_OF_ADAPTERS, threads=1)
            return
        for case in cases(given):
            rows.append(benchmark(*case))
            write_result(given.name, rows, columns=COLUMNS, threads=1)


if __name__ == "__main__":
    main()
