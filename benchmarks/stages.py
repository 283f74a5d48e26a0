"""Where does the time of ACTMat go? One matrix of each shape of a Llama, by stage, with rates against the peak.

    python -m benchmarks.stages                                     # 1.1 B, two minutes
    python -m benchmarks.stages --model 7b --halved down_proj --name stages_7b --matrices stages_7b_matrices

From files to a file: three experts in bfloat16 whose deltas have singular values `i^-0.7`, one worker. Seconds are
processor time of the worker. Those of a stage are sums over the model: one matrix of each shape, times the number of
such matrices, an extrapolation. `of peak` is the rate of the operations of a stage over that of a square product of the
same dtype (median of five in the same process). Operations are those that are made; of a whole eigendecomposition the
nominal `9 N^3`. A matrix that is `--halved` is measured at half its sides, for want of memory: its products and
decompositions are counted eight times, its passes over entries four times. `--matrices NAME` writes the times of the
matrices into a result file of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

import actmat
from actmat.engine.reader import TensorReader
from actmat.engine.session import Session
from actmat.engine.writing import TensorOutput
from actmat.linalg import operations
from actmat.linalg.interference import moments, solver, spectral_solve
from benchmarks.common import WORK, fresh, markdown, torch_threads, write_result
from benchmarks.make_llama import INITIAL_RMS, noise
from benchmarks.matrix import make_deltas

COLUMNS = ("stage", "cpu_s", "share", "rate_gflops", "of_peak")
MATRIX_COLUMNS = ("matrix", "shape", "count", "measured", "solver", "kept", "basis", "cpu_s", "share")
SPECTRUM, EXPERTS, PEAK_SIDE = "power0.7", 3, 2048

READ, NORMS = "read, hash, subtract", "norms and checks"
GRAM, TARGET = "symmetric products: D^T D, D D^T", "products with a delta"
PROOF, PART, WHOLE = "proof that all is kept", "part of the spectrum", "whole spectrum"
APPLY, WRITE, OTHER = "products with the inverse or its factors", "add, round, hash, write", "other"
DOUBLE = {PART, WHOLE}
PASSES = {READ, NORMS, WRITE, OTHER}
"""Stages whose time grows with the entries of a matrix; that of the others grows with the cube of its sides."""


@dataclass(frozen=True)
class Model:
    """Widths of a Llama."""

    hidden: int
    intermediate: int
    key_value: int
    layers: int
    vocabulary: int = 32000

    def matrices(self) -> list[tuple[str, tuple[int, int], int]]:
        """Name, shape and number of the matrices of each shape."""
        layer, h, i = "model.layers.0.", self.hidden, self.intermediate
        others = [
            (f"{layer}mlp.gate_proj.weight", (i, h), 2 * self.layers),
            (f"{layer}mlp.down_proj.weight", (h, i), self.layers),
            ("lm_head.weight", (self.vocabulary, h), 1),
        ]
        if self.key_value == h:
            return [(f"{layer}self_attn.q_proj.weight", (h, h), 4 * self.layers), *others]
        return [
            (f"{layer}self_attn.q_proj.weight", (h, h), 2 * self.layers),
            (f"{layer}self_attn.k_proj.weight", (self.key_value, h), 2 * self.layers),
            *others,
        ]


MODELS = {
    "1b": Model(2048, 5632, 256, 22),
    "7b": Model(4096, 11008, 4096, 32),
    "tiny": Model(64, 176, 16, 2, vocabulary=300),
}


@dataclass
class Stages:
    """Processor seconds and operations by stage; time of a stage inside another is counted to the inner one only."""

    seconds: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)  # seconds of inner stages, of every stage that is open

    def counted(self, stage: str, call: Callable[..., Any], flops: Callable[..., float] | None) -> Callable[..., Any]:
        """The call, counted to a stage; `flops` is given its result and its arguments."""

        def run(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            found = call(*given, **named)
            took = time.thread_time() - began
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took
            if flops is not None:
                self.flops[stage] = self.flops.get(stage, 0.0) + flops(found, *given)
            return found

        return run

    def add(self, other: Stages, times: int) -> None:
        """Add so many times what another counted."""
        for mine, theirs in ((self.seconds, other.seconds), (self.flops, other.flops)):
            for stage, value in theirs.items():
                mine[stage] = mine.get(stage, 0.0) + times * value

    def doubled(self) -> Stages:
        """What a matrix of twice the sides would take."""
        grown = [{n: x * (4 if n in PASSES else 8) for n, x in d.items()} for d in (self.seconds, self.flops)]
        return Stages(*grown)


def _gram_flops(found: None, out_II: Tensor, a_RI: Tensor, *_: float) -> float:
    return operations.gram(*a_RI.shape).flops


def _product_flops(found: Tensor, left: Tensor, right: Tensor, *_: Tensor) -> float:
    return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]


def _part_flops(found: Any, sym_NN: Tensor, *_: Any) -> float:
    """Basis and its orthogonality, vectors, proof; an attempt that was given up is not counted."""
    if isinstance(found, str):
        return 0.0
    n, j, k = sym_NN.shape[0], found.basis, len(found.values_K)
    return 2.0 * n * n * j + 2.0 * n * j * j + 2.0 * j * k * n + operations.gram(k, n).flops + n**3 / 3


def _whole_flops(found: Any, sym_NN: Tensor) -> float:
    return operations.eigh(sym_NN.shape[0]).flops


def _gain_flops(found: Any, gain: spectral_solve.Gain, rows: int) -> float:
    return 2.0 * gain.products(rows)


def _right_flops(found: None, reduced: moments.Reduced, apply: Any, out_OI: Tensor, *_: Any) -> float:
    return 0.0 if reduced.right_NI is None else 2.0 * out_OI.shape[0] * reduced.right_NI.numel()


def _factor_flops(found: None, apply: Any, left: Tensor, out_OI: Tensor) -> float:
    """Of the last product where a second reading gave coordinates; a numerator is counted with its gain."""
    return 0.0 if left is out_OI else 2.0 * left.shape[0] * left.shape[1] * out_OI.shape[1]


@contextlib.contextmanager
def instrumented(stages: Stages) -> Iterator[None]:
    """Inside, calls of the library are counted to their stages."""
    places: list[tuple[Any, str, str, Callable[..., float] | None]] = [
        (Session, "merge", OTHER, None),
        (TensorReader, "read_base", READ, None),
        (TensorReader, "load", READ, None),
        (solver, "frobenius_norm64", NORMS, None),
        (moments, "add_gram", GRAM, _gram_flops),
        (moments, "gram_of_rows", TARGET, None),
        (moments, "multiply", TARGET, _product_flops),
        (spectral_solve, "certified_cholesky", PROOF, None),
        (moments, "leading", PART, _part_flops),
        (moments, "eigh", WHOLE, _whole_flops),
        (spectral_solve.EigenPairs, "applier", APPLY, _gain_flops),
        (spectral_solve.Inverse, "applier", APPLY, _gain_flops),
        (solver, "apply_gain", APPLY, _right_flops),
        (TensorOutput, "take", WRITE, None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stage, flops in places:
            stack.enter_context(mock.patch.object(owner, name, stages.counted(stage, getattr(owner, name), flops)))
        yield


def make_inputs(folder: Path, name: str, deltas: Sequence[Tensor]) -> list[Path]:
    """A base and experts that hold one tensor."""
    places = [folder / "base", *(folder / f"expert-{t}" for t in range(EXPERTS))]
    base = noise(name, tuple(deltas[0].shape), 0).mul_(INITIAL_RMS).bfloat16()
    for place, stored in zip(places, [base, *((base.float() + d).bfloat16() for d in deltas)], strict=True):
        fresh(place).mkdir(parents=True)
        save_file({name: stored}, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return places


def measured(name: str, shape: tuple[int, int], repeats: int) -> tuple[Stages, dict[str, Any]]:
    """Stages of one merge (of the median time), and what the record says."""
    places = make_inputs(WORK / "stages", name, make_deltas(EXPERTS, *shape, SPECTRUM))
    runs: list[tuple[float, Stages, dict[str, Any]]] = []
    for _ in range(repeats):
        stages, out = Stages(), fresh(WORK / "out" / "stages")
        with instrumented(stages):
            report = actmat.merge(places[0], places[1:], out=out, method="actmat", threads=1)
        (tensor,) = report.manifest["tensors"]
        runs.append((sum(stages.seconds.values()), stages, tensor.get("stats", tensor)))
    runs.sort(key=lambda run: run[0])
    return runs[len(runs) // 2][1:]


def peak(dtype: torch.dtype) -> float:
    """Operations per second of a square product, on this thread's clock."""
    a, b = (torch.rand(PEAK_SIDE, PEAK_SIDE, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(6):
        began = time.thread_time()
        torch.mm(a, b)
        times.append(time.thread_time() - began)
    return 2 * PEAK_SIDE**3 / statistics.median(times[1:])


def main() -> None:
    """Measure every shape; print and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument("--repeats", type=int, default=1, help="merges of each shape")
    parser.add_argument("--halved", nargs="+", default=[], metavar="MATRIX", help="measured at half their sides")
    parser.add_argument("--name", default="stages", help="name of the result file of the stages")
    parser.add_argument("--matrices", default="stages_matrices", help="name of that of the matrices")
    given = parser.parse_args()
    load, total, rows = os.getloadavg()[0], Stages(), []
    with torch_threads(1):
        peaks = {double: peak(torch.float64 if double else torch.float32) for double in (False, True)}
        for name, shape, count in MODELS[given.model].matrices():
            label, halved = name.split(".")[-2], name.split(".")[-2] in given.halved
            at = (shape[0] // 2, shape[1] // 2) if halved else shape
            stages, stats = measured(name, at, given.repeats)
            stages = stages.doubled() if halved else stages
            total.add(stages, count)
            row = {
                "matrix": label,
                "shape": f"{shape[0]} x {shape[1]}",
                "count": count,
                "measured": f"{at[0]} x {at[1]}",
            }
            row |= {"solver": stats["solver"], "kept": stats["rank"], "basis": stats.get("basis")}
            row |= {"cpu_s": sum(stages.seconds.values()), "stages_s": stages.seconds}
            rows.append(row)
            print(markdown([row], MATRIX_COLUMNS).splitlines()[-1], flush=True)
    whole = sum(total.seconds.values())
    for row in rows:
        row["share"] = row["count"] * row["cpu_s"] / whole
    found: list[dict[str, Any]] = []
    for stage, seconds in sorted(total.seconds.items(), key=lambda item: -item[1]):
        found.append({"stage": stage, "cpu_s": seconds, "share": seconds / whole})
        if total.flops.get(stage):
            rate = total.flops[stage] / seconds
            found[-1] |= {"rate_gflops": rate / 1e9, "of_peak": rate / peaks[stage in DOUBLE]}
    found.append({"stage": "all", "cpu_s": whole, "share": 1.0})
    more = {"model": given.model, "experts": EXPERTS, "spectrum": SPECTRUM, "repeats": given.repeats}
    more |= {"load_before": load, "peak_f32_gflops": peaks[False] / 1e9, "peak_f64_gflops": peaks[True] / 1e9}
    print(markdown(found, COLUMNS))
    print(write_result(given.name, found, **more, columns=COLUMNS))
    print(write_result(given.matrices, rows, **more, columns=MATRIX_COLUMNS))


if __name__ == "__main__":
    main()
