"""What a second reading of the deltas saves, from files to a file: one matrix of each shape, in one reading and in two.

    python -m benchmarks.rereading
    python -m benchmarks.rereading --shapes 512x128 128x300 --smallest 64 --repeats 1

Three experts in bfloat16, one worker, processor seconds of the whole merge, medians of runs in turn. `times_faster` is
the geometric mean over the pairs of runs, `low` and `high` its 95 % interval (t). `way` is what the second reading
computed (`actmat/linalg/interference/rereading.py`). `from f64` is the distance of the merged delta, in float32, from
the published formula in float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import actmat
from actmat.linalg.interference import rereading
from actmat.linalg.interference.rule import FLOAT32_EPS, Rule
from actmat.linalg.interference.solver import finish, prepare
from benchmarks.common import WORK, fresh, markdown, torch_threads, write_result
from benchmarks.comparison.timings import paired_ratio
from benchmarks.matrix import make_deltas
from benchmarks.stages import EXPERTS, make_inputs

COLUMNS = (
    "shape", "spectrum", "kept", "solver", "way", "once_cpu_s", "twice_cpu_s", "times_faster", "low", "high",
    "once_from_f64", "twice_from_f64",
)  # fmt: skip
SHAPES = ("32000x2048", "5632x2048", "2048x5632")
SPECTRA = ("power0.5", "power0.7", "power1", "gaussian")
NEVER = 1 << 40


def exact(deltas: list[Tensor]) -> Tensor:
    """The published formula in float64."""
    wide = [d.double() for d in deltas]
    grams = [d.mT @ d for d in wide]
    values, vectors = torch.linalg.eigh(torch.stack(grams).sum(0))
    kept = values > deltas[0].shape[1] * FLOAT32_EPS * values[-1]
    target = torch.stack([d @ (k @ vectors[:, kept]) for d, k in zip(wide, grams, strict=True)]).sum(0)
    return (target / values[kept]) @ vectors[:, kept].mT


def merge_seconds(places: list[Path]) -> tuple[float, dict[str, Any]]:
    """Processor seconds of one merge on its worker, and the record of the only tensor."""
    out = fresh(WORK / "out" / "rereading")
    began = time.process_time()
    report = actmat.merge(places[0], places[1:], out=out, method="actmat", threads=1)
    took = time.process_time() - began
    (tensor,) = report.manifest["tensors"]
    return took, tensor["stats"]


def faster(once: list[float], twice: list[float]) -> dict[str, float | None]:
    """How many times as fast two readings are, over the pairs of runs, with its interval."""
    mean, low, high = paired_ratio(twice, once)
    return {"times_faster": mean, "low": low, "high": high}


def measured(shape: tuple[int, int], spectrum: str, smallest: int, repeats: int) -> dict[str, Any]:
    """One row."""
    name = "model.layers.0.mlp.up_proj.weight"
    deltas = make_deltas(EXPERTS, *shape, spectrum)
    places = make_inputs(WORK / "rereading", name, deltas)
    seconds: dict[int, list[float]] = {NEVER: [], smallest: []}
    records: dict[int, dict[str, Any]] = {}
    for _ in range(repeats):
        for limit, found in seconds.items():
            with mock.patch.object(rereading, "SMALLEST", limit):
                took, records[limit] = merge_seconds(places)
            found.append(took)
    right = exact(deltas)
    apart: dict[int, float] = {}
    for limit in seconds:
        with mock.patch.object(rereading, "SMALLEST", limit):
            value, _ = finish(prepare(deltas, Rule()), Rule(), consume=True)
        apart[limit] = float((value.double() - right).norm() / right.norm())
    once, twice = (statistics.median(s) for s in seconds.values())
    stats = records[smallest]
    return {
        "shape": f"{shape[0]} x {shape[1]}",
        "spectrum": spectrum,
        "kept": stats["rank"],
        "solver": stats["solver"],
        "way": stats.get("second_reading"),
        "once_cpu_s": once,
        "twice_cpu_s": twice,
        **faster(*seconds.values()),
        "once_from_f64": apart[NEVER],
        "twice_from_f64": apart[smallest],
        "all_cpu_s": list(seconds.values()),
    }


def main() -> None:
    """Measure every shape with every spectrum; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--spectra", nargs="+", default=list(SPECTRA))
    parser.add_argument("--smallest", type=int, default=rereading.SMALLEST, help="in_features from which to read twice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="rereading", help="name of the result file")
    given = parser.parse_args()
    rows = []
    with torch_threads(1):
        for text in given.shapes:
            rows_of, width = (int(n) for n in text.split("x"))
            for spectrum in given.spectra:
                rows.append(measured((rows_of, width), spectrum, given.smallest, given.repeats))
                print(markdown(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    print(write_result(given.name, rows, experts=EXPERTS, repeats=given.repeats, columns=COLUMNS))


if __name__ == "__main__":
    main()
