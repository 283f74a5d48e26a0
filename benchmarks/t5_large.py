"""The paper's latency table: seven experts of the shapes of T5-large, merged by the rules that it compares.

    python -m benchmarks.t5_large                           # CPU: one matrix of each shape, times its number
    python -m benchmarks.t5_large --whole --device cuda     # a GPU: all 384 matrices, nothing extrapolated

T5-large (v1.0) has 24 encoder blocks (self-attention and feed-forward) and 24 decoder blocks (a cross-attention more):
288 matrices of 1024 x 1024, 48 of 4096 x 1024 and 48 of 1024 x 4096. The rest (the embedding, norms, biases of
positions) is averaged by every rule. Without `--whole`, one matrix of each shape is merged `--repeats` times and the
median is multiplied by the number of such matrices: rows of a measurement, and a sum that is an extrapolation and is
called one. With it, every matrix is made on the device and merged, and only the merges are timed.

On a CPU the seconds are those of the process, with one thread: on a quiet machine that is the time on the clock.

Deltas are Gaussian with the columns scaled by `k^-1`, so that the cut-off of `actmat` drops directions and its fast
path for regular sums does not apply. Gram matrices are made up. Neither reading of checkpoints nor collection of
statistics is in these times. The paper's minutes (one L40S GPU) hold the reading of seven checkpoints of 3 GB, and of
as many files of Gram matrices for RegMean, so that the columns compare within themselves, not with each other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import markdown, torch_threads, write_result

BLOCKS, WIDTH, INNER, WORDS = 24, 1024, 4096, 32128
EXPERTS = 7
PAPER_MINUTES = {"average": 0.05, "iso_c": 0.40, "tsv": 3.24, "regmean": 4.66, "actmat": 2.34}
METHODS = ("average", "task_arithmetic", "iso_c", "tsv", "regmean", "actmat", "actmat_ridge")
COLUMNS = [
    "method",
    "square_s",
    "up_s",
    "down_s",
    "other_s",
    "whole_s",
    "whole_minutes",
    "in_averages",
    "paper_minutes",
]


@dataclass(frozen=True)
class Shape:
    """Matrices of one shape, and how many the model has."""

    name: str
    size: tuple[int, int]
    count: int


def shapes(blocks: int = BLOCKS, width: int = WIDTH, inner: int = INNER) -> list[Shape]:
    """`O x I` of the matrices: q, k, v, o of the three attentions of an encoder and a decoder block, wi and wo.

    >>> [(s.name, s.size, s.count) for s in shapes()]
    [('square', (1024, 1024), 288), ('up', (4096, 1024), 48), ('down', (1024, 4096), 48)]
    """
    return [
        Shape("square", (width, width), blocks * (4 + 8)),
        Shape("up", (inner, width), 2 * blocks),
        Shape("down", (width, inner), 2 * blocks),
    ]


class Layer:
    """Deltas, base and made-up Gram matrices of one matrix, on a device."""

    def __init__(self, size: tuple[int, int], n_experts: int, device: str, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        rows, columns = size

        def gaussian(n: int, m: int) -> Tensor:
            return torch.randn(n, m, generator=generator, device=device)

        scale = 1 / torch.arange(1, columns + 1, device=device)
        order = torch.randperm(columns, generator=generator, device=device)
        self.deltas = [1e-3 * gaussian(rows, columns) * scale[order] for _ in range(n_experts)]
        self._seeds = [gaussian(columns, min(columns, 256)) for _ in range(n_experts)]

    def grams(self) -> list[Tensor]:
        """One per expert, of full rank."""
        found = [a @ a.mT / a.shape[1] for a in self._seeds]
        for gram in found:
            gram.diagonal().add_(0.1)
        return found


def merged(method: str, layer: Layer) -> Callable[[], Tensor]:
    """A merge of the layer, ready to be timed: statistics are made beforehand."""
    import actmat

    given: dict[str, Any] = {"statistics": {"gram": layer.grams()}} if method == "regmean" else {}
    return lambda: actmat.merge_matrices(method, layer.deltas, **given)


def seconds(work: Callable[[], object], device: str) -> float:
    """Of one call: on a GPU until it is done; on a CPU the time of the process, whatever else the machine does."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    _wait(device)
    started = clock()
    work()
    _wait(device)
    return clock() - started


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def sliced(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """One matrix of each shape; `whole_s` is the sum of medians times counts: an extrapolation."""
    row: dict[str, Any] = {"method": method, "extrapolated": True}
    total = 0.0
    for shape in shapes(given.blocks, given.width, given.inner):
        work = merged(method, Layer(shape.size, given.experts, given.device, given.seed))
        times = [seconds(work, given.device) for _ in range(given.repeats)]
        row[f"{shape.name}_s"] = statistics.median(times)
        row[f"all_{shape.name}_s"] = times
        total += shape.count * row[f"{shape.name}_s"]
    return finished(row, total, given)


def every_layer(given: argparse.Namespace) -> Iterator[tuple[Shape, Layer]]:
    """All matrices of the model, one alive at a time."""
    for shape in shapes(given.blocks, given.width, given.inner):
        for index in range(shape.count):
            yield shape, Layer(shape.size, given.experts, given.device, given.seed + index)


def whole(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """Every matrix; the shape's columns are means."""
    spent: dict[str, list[float]] = {}
    for shape, layer in every_layer(given):
        spent.setdefault(shape.name, []).append(seconds(merged(method, layer), given.device))
    row: dict[str, Any] = {"method": method, "extrapolated": False}
    row |= {f"{name}_s": statistics.mean(times) for name, times in spent.items()}
    return finished(row, sum(map(sum, spent.values())), given)


def finished(row: dict[str, Any], matrices_s: float, given: argparse.Namespace) -> dict[str, Any]:
    """The row with the averaged rest and the sums."""
    row["other_s"] = given.other_s
    row["whole_s"] = matrices_s + given.other_s
    row["whole_minutes"] = row["whole_s"] / 60
    row["paper_minutes"] = PAPER_MINUTES.get(row["method"])
    print(markdown([row], COLUMNS).splitlines()[-1], flush=True)
    return row


def rest_seconds(given: argparse.Namespace) -> float:
    """The average of the embedding table, which every rule takes."""
    generator = torch.Generator(given.device).manual_seed(given.seed)
    tables = [
        torch.randn(given.words, given.width, generator=generator, device=given.device) for _ in range(given.experts)
    ]
    return seconds(lambda: sum(tables[1:], tables[0]) / len(tables), given.device)


def warm_up(given: argparse.Namespace) -> None:
    """Imports, and what a device does in its first calls, are not measured."""
    for method in given.methods:
        seconds(merged(method, Layer((64, 64), given.experts, given.device, 0)), given.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--whole", action="store_true", help="merge all matrices, extrapolate nothing")
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--repeats", type=int, default=1, help="merges behind a median, without --whole")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; the times are sums over threads")
    parser.add_argument("--seed", type=int, default=0)
    for name, size in (("blocks", BLOCKS), ("width", WIDTH), ("inner", INNER), ("words", WORDS)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the model; smaller for a trial")
    parser.add_argument("--name", default="t5_large", help="name of the result file")
    given = parser.parse_args()
    with torch_threads(given.threads):
        warm_up(given)
        given.other_s = rest_seconds(given)
        rows = [(whole if given.whole else sliced)(method, given) for method in given.methods]
    averages = next((row["whole_s"] for row in rows if row["method"] == "average"), None)
    for row in rows:
        row["in_averages"] = row["whole_s"] / averages if averages else None
    device = torch.cuda.get_device_name(given.device) if given.device.startswith("cuda") else "cpu"
    print("\n" + markdown(rows, COLUMNS))
    if not given.whole:
        print("whole_s is extrapolated: one matrix of each shape, times the number of such matrices in the model.")
    more = {"experts": given.experts, "threads": given.threads, "device": device, "extrapolated": not given.whole}
    print(write_result(given.name, rows, columns=COLUMNS, **more))


if __name__ == "__main__":
    main()
