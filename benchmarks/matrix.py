"""The matrix rules on random experts: time and agreement with the published formulae, written down naively.

    python -m benchmarks.matrix
    python -m benchmarks.matrix --experts 4 --shapes 512x512 --methods actmat

`naive` is the formula as published, with the library routines that it suggests: a pseudo-inverse by full SVD for
ACTMat, full SVDs of every delta for TSV-M and Iso-C; all in float32, on the same tensors, in turn with actmat's own.
`bound` is what the arithmetic alone would cost at this machine's measured rates: for ACTMat the products `D^T D`,
`D D^T D` and the last one, and one symmetric eigendecomposition. A Cholesky factorization, where the cut-off provably
does nothing, may be faster than this bound.

Deltas are `gaussian` (flat spectra), `powerP` (`s_k = k^-P`, P = 1 if left out, random singular vectors), `lowrank` (a
sixteenth of the directions), `dominant` (flat but for one direction) or `cutoff` (a tenth of the eigenvalues of `S` at
the cut-off, up to rounding). Both sides use the same
cut-off, `I * eps(float32)`; `difference` is `||ours - naive||_F / ||naive||_F`, and `ours f64`, `naive f64` are the
distances of both from the same formula in float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import eigh_time, finish, markdown, matmul_rate, once, program, relative_error, torch_threads

EPS32 = torch.finfo(torch.float32).eps
AGREEMENT = 1e-4
COLUMNS = (
    "method", "shape", "spectrum", "actmat_s", "naive_s", "ratio", "bound_s", "times_bound",
    "difference", "actmat_from_f64", "naive_from_f64",
)  # fmt: skip


# The published formulae, as they stand. Shapes: D_t is O x I.


def moments(deltas: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`sum_t C_t` and `sum_t D_t C_t`, each `C_t = D_t^T D_t` formed once."""
    covariances = [d.mT @ d for d in deltas]
    target = torch.stack([d @ c for d, c in zip(deltas, covariances, strict=True)]).sum(0)
    return torch.stack(covariances).sum(0), target


def naive_actmat(deltas: Sequence[Tensor]) -> Tensor:
    """`(sum_t D_t D_t^T D_t) (sum_t D_t^T D_t)^+`."""
    second_moment, target = moments(deltas)
    return target @ torch.linalg.pinv(second_moment, rtol=second_moment.shape[-1] * EPS32)


def naive_ridge(deltas: Sequence[Tensor], ridge: float = 0.1) -> Tensor:
    """`(sum_t D_t D_t^T D_t) (S + ridge tr(S)/I Id)^-1`, `S = sum_t D_t^T D_t`, by a full pseudo-inverse."""
    second_moment, target = moments(deltas)
    size = second_moment.shape[-1]
    shift = ridge * second_moment.trace() / size
    return target @ torch.linalg.pinv(second_moment + shift * torch.eye(size).to(second_moment), rtol=0.0)


def naive_tsv(deltas: Sequence[Tensor]) -> Tensor:
    """TSV-M: the first `min(O, I) // T` singular triples of every delta; `U`, `V` whitened by their polar factors."""
    keep = min(deltas[0].shape) // len(deltas)
    parts = [torch.linalg.svd(d, full_matrices=False) for d in deltas]
    u = torch.cat([u[:, :keep] for u, _, _ in parts], dim=1)
    s = torch.cat([s[:keep] for _, s, _ in parts])
    vh = torch.cat([vh[:keep] for _, _, vh in parts], dim=0)
    return polar(u) @ torch.diag(s) @ polar(vh)


def naive_iso_c(deltas: Sequence[Tensor]) -> Tensor:
    """Iso-C: `mean(s) U V^T` of the sum."""
    u, s, vh = torch.linalg.svd(torch.stack(list(deltas)).sum(0), full_matrices=False)
    return s.mean() * u @ vh


def polar(matrix: Tensor) -> Tensor:
    """Nearest matrix with orthonormal columns or rows, by SVD."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


SPECTRA = (
    "gaussian", "power", "power0.5", "power0.6", "power0.7", "power0.85", "power1.5", "lowrank", "dominant", "cutoff",
)  # fmt: skip

NAIVE: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "actmat": naive_actmat,
    "actmat_ridge": naive_ridge,
    "tsv": naive_tsv,
    "iso_c": naive_iso_c,
}


def make_deltas(count: int, rows: int, columns: int, spectrum: str) -> list[Tensor]:
    """Random deltas of size 1e-2 per entry; `spectrum` as in `SPECTRA`, or `power` and an exponent."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rank = min(rows, columns)
    if spectrum == "gaussian":
        return [normal(rows, columns) * 1e-2 for _ in range(count)]
    if spectrum == "lowrank":
        inner = max(1, rank // 16)
        return [normal(rows, inner) @ normal(inner, columns) * (1e-2 / inner**0.5) for _ in range(count)]
    if spectrum == "dominant":
        return [1e-4 * normal(rows, columns) + 1e-2 * normal(rows, 1) @ normal(1, columns) for _ in range(count)]
    values = singular_values(spectrum, rank, columns)
    values *= 1e-2 * (rows * columns) ** 0.5 / torch.linalg.vector_norm(values)
    shared = torch.linalg.qr(normal(columns, rank)).Q if spectrum == "cutoff" else None
    return [
        torch.linalg.qr(normal(rows, rank)).Q
        * values
        @ (torch.linalg.qr(normal(columns, rank)).Q if shared is None else shared).mT
        for _ in range(count)
    ]


def singular_values(spectrum: str, rank: int, columns: int) -> Tensor:
    """Descending. Of `cutoff`: 2 % above the default cut-off, 10 % at it to one part in a million, 88 % far below."""
    if spectrum != "cutoff":
        return torch.arange(1, rank + 1, dtype=torch.float32).pow(-float(spectrum.removeprefix("power") or 1))
    above, at = max(1, rank // 50), rank // 10
    cut = columns * EPS32
    squares = [
        torch.logspace(0, math.log10(2 * cut), above, dtype=torch.float64),
        cut * (1 + 1e-6 * torch.linspace(1, -1, at, dtype=torch.float64)),
        torch.full((rank - above - at,), cut * 1e-3, dtype=torch.float64),
    ]
    return torch.cat(squares).sqrt().float()


def bound_seconds(count: int, rows: int, columns: int, threads: int) -> float:
    """Products and one eigendecomposition of ACTMat at the machine's rates.

    `S`: `2 O I^2` operations per expert (no use of its symmetry). `D D^T D`: another `2 O I^2` from `D^T D`, or
    `4 O^2 I` from `D D^T` where `O < I / 2`. Last product and the projection: `2 O I^2` and `2 I^3`. The
    eigendecomposition is of `S` in float64, as the solver takes it.
    """
    per_expert = 2 * rows * columns**2 + min(2 * rows * columns**2, 4 * rows**2 * columns)
    operations = count * per_expert + 2 * rows * columns**2 + 2 * columns**3
    rate = matmul_rate(2048, torch.float32, threads)
    return operations / rate + eigh_time(columns, torch.float64, threads)


def benchmark(method: str, shape: tuple[int, int], spectrum: str, given: argparse.Namespace) -> dict[str, Any]:
    """One row: medians of alternating runs, agreement, bound."""
    import actmat

    deltas = make_deltas(given.experts, *shape, spectrum)
    naive = NAIVE[method]
    answers: dict[str, Tensor] = {}
    times: dict[str, list[float]] = {"actmat": [], "naive": []}

    def ours() -> None:
        answers["actmat"] = actmat.merge_matrices(method, deltas)

    def theirs() -> None:
        answers["naive"] = naive(deltas)

    actmat.merge_matrices(method, [d[:8, :8] for d in deltas])  # imports and first-call work are not what is measured
    naive([d[:8, :8] for d in deltas])
    for _ in range(given.repeats):
        times["actmat"].append(once(ours))
        times["naive"].append(once(theirs))
    middle = {name: statistics.median(all_times) for name, all_times in times.items()}
    row: dict[str, Any] = {
        "method": method,
        "shape": f"{shape[0]}x{shape[1]}",
        "spectrum": spectrum,
        "actmat_s": middle["actmat"],
        "naive_s": middle["naive"],
        "ratio": middle["naive"] / middle["actmat"],
        "difference": relative_error(answers["actmat"], answers["naive"]),
        "all_actmat_s": times["actmat"],
        "all_naive_s": times["naive"],
    }
    if method.startswith("actmat"):
        row["bound_s"] = bound_seconds(given.experts, *shape, given.threads)
        row["times_bound"] = middle["actmat"] / row["bound_s"]
    if given.float64:
        expected = naive([d.double() for d in deltas])
        row["actmat_from_f64"] = relative_error(answers["actmat"], expected)
        row["naive_from_f64"] = relative_error(answers["naive"], expected)
    row["agrees"] = row["difference"] <= AGREEMENT
    print(markdown([row], COLUMNS).splitlines()[-1])
    return row


def shape_from(text: str) -> tuple[int, int]:
    """`4096x1024` -> (4096, 1024): O, then I."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def main() -> None:
    parser = program(__doc__, "matrix", 3)
    parser.add_argument("--methods", nargs="+", choices=sorted(NAIVE), default=list(NAIVE))
    parser.add_argument("--shapes", nargs="+", type=shape_from, default=[(1024, 1024), (4096, 1024), (1024, 4096)])
    parser.add_argument("--spectra", nargs="+", choices=SPECTRA, default=["gaussian", "power"])
    parser.add_argument("--experts", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--float64", action="store_true", help="also compare both with the formula in float64 (slow)")
    given = parser.parse_args()
    with torch_threads(given.threads):
        rows = [
            benchmark(method, shape, spectrum, given)
            for method in given.methods
            for shape in given.shapes
            for spectrum in given.spectra
        ]
    finish(given.name, rows, COLUMNS, experts=given.experts, threads=given.threads)
    apart = [f"{r['method']} {r['shape']} {r['spectrum']}: {r['difference']:.1e}" for r in rows if not r["agrees"]]
    if apart:
        print(f"differ from the published formula by more than {AGREEMENT:g}:\n  " + "\n  ".join(apart))


if __name__ == "__main__":
    main()
