"""Part of the spectrum or all of it: an interference method with and without the partial eigensolver.

    python -m benchmarks.spectrum                               # 2048 x 5632, and square, by spectrum
    python -m benchmarks.spectrum --shapes 512x1024 --spectra power dominant --float64

`full` is the same method with `solver="eigh"`, which decomposes all of `S` and differs in nothing else where a cut-off
drops something. Both run in turn in one process on one thread; seconds are of its processor time, medians. `solver` is
the path on the record, `kept` the rank. With `--float64`, both are compared with the published formula in float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat.methods import get_method
from benchmarks.common import markdown, write_result
from benchmarks.matrix import EPS32, SPECTRA, error, make_deltas, moments, shape_from

COLUMNS = (
    "shape",
    "spectrum",
    "kept",
    "solver",
    "basis",
    "cpu_s",
    "full_cpu_s",
    "times_faster",
    "apart",
    "from_f64",
    "full_from_f64",
)


def exact(deltas: Sequence[Tensor]) -> Tensor:
    """The published formula in float64."""
    second_moment, target = moments([d.double() for d in deltas])
    width = second_moment.shape[-1]
    return target @ torch.linalg.pinv(second_moment, rtol=width * EPS32, hermitian=True)


def row_of(shape: tuple[int, int], spectrum: str, given: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turn, on the same deltas."""
    method = get_method(given.method)
    deltas = make_deltas(given.experts, *shape, spectrum)
    ways = {"part": method.resolve_options({}), "full": method.resolve_options({"solver": "eigh"})}
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {}
    for repeat in range(given.repeats):
        for name, options in ways.items():
            if name == "full" and repeat >= given.full_repeats:
                continue
            started = time.process_time()
            found[name] = method.merge(deltas, **options)
            times[name].append(time.process_time() - started)
    part, full = (statistics.median(times[name]) for name in ways)
    stats = found["part"].stats
    row: dict[str, Any] = {"shape": f"{shape[0]} x {shape[1]}", "spectrum": spectrum, "kept": stats["rank"]}
    row |= {"solver": stats["solver"], "basis": stats.get("basis", "-")}
    row |= {"cpu_s": part, "full_cpu_s": full, "times_faster": full / part}
    row["apart"] = error(found["part"].value, found["full"].value)
    if given.float64:
        expected = exact(deltas)
        row |= {"from_f64": error(found["part"].value, expected), "full_from_f64": error(found["full"].value, expected)}
    row["all_s"] = times
    print(markdown([row], COLUMNS).splitlines()[-1], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="actmat")
    parser.add_argument("--shapes", nargs="+", type=shape_from, default=[(2048, 2048), (2048, 5632)])
    parser.add_argument("--spectra", nargs="+", choices=SPECTRA, default=list(SPECTRA[1:]))
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full-repeats", type=int, default=3, help="runs of the slower way, at most as many")
    parser.add_argument("--float64", action="store_true", help="compare both with the formula in float64 (slow)")
    parser.add_argument("--name", default="spectrum", help="name of the result file")
    given = parser.parse_args()
    with one_thread(), torch.no_grad():
        rows = [row_of(shape, spectrum, given) for shape in given.shapes for spectrum in given.spectra]
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, experts=given.experts, method=given.method, columns=COLUMNS))


if __name__ == "__main__":
    main()
