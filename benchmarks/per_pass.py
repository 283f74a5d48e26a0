"""Methods on entries, by the number of passes that they make over the deltas: is one slower than the average's pass?

    python -m benchmarks.per_pass

One tensor of three experts in bfloat16, from files to a file, one worker, in one process; the methods run in turn.
`ns_per_entry` is processor time of the worker per entry of the tensor (median), `method` the part of it inside the
method, without what it reads and draws, `draw` that of random numbers. A pass is one look at every entry of every
delta: TIES looks twice for its thresholds and then votes; breadcrumbs have two thresholds, which share the first look.
A tensor of this size is read again in every walk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import save_file

import actmat
from actmat.engine.kernels import dense
from actmat.engine.reader import TensorReader
from actmat.engine.session import Session
from actmat.engine.writing import TensorOutput
from actmat.linalg.masks import mask
from benchmarks.common import WORK, fresh, markdown, torch_threads, write_result
from benchmarks.make_llama import INITIAL_RMS, noise
from benchmarks.stages import Stages

COLUMNS = ("method", "passes", "ns_per_entry", "method_ns", "draw_ns", "per_pass_ns", "times_average")
PASSES = {"average": 1, "task_arithmetic": 1, "dare": 1, "ties": 3, "breadcrumbs": 4}
NAME, EXPERTS = "model.layers.0.mlp.up_proj.weight", 3


@contextlib.contextmanager
def instrumented(stages: Stages) -> Iterator[None]:
    """Inside, what is read, computed and written is counted apart."""
    places = [
        (Session, "merge", "other"),
        (TensorReader, "read_chunk", "read"),
        (dense, "apply_method", "method"),
        (TensorOutput, "take", "write"),
        (mask, "_draws", "draw"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(mock.patch.object(owner, name, stages.counted(stage, getattr(owner, name), None)))
        yield


def make_inputs(folder: Path, shape: tuple[int, int]) -> list[Path]:
    """A base and experts that differ from it a little, of one tensor."""
    places = [folder / str(k) for k in range(EXPERTS + 1)]
    base = noise(NAME, shape, 0).mul_(INITIAL_RMS)
    for k, place in enumerate(places):
        stored = base if k == 0 else base + noise(NAME, shape, k).mul_(INITIAL_RMS * 0.05)
        fresh(place).mkdir(parents=True)
        save_file({NAME: stored.bfloat16()}, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return places


def main() -> None:
    """Run all methods in turn and write benchmarks/results/per_pass.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16000, help="of the tensor, which has 2048 columns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="per_pass", help="name of the result file")
    given = parser.parse_args()
    places, entries = make_inputs(WORK / "per_pass", (given.rows, 2048)), given.rows * 2048
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in PASSES}
    load = os.getloadavg()[0]
    with torch_threads(1):
        for repeat in range(given.repeats + 1):
            for method, found in runs.items():
                stages, out = Stages(), fresh(WORK / "out" / "per_pass")
                with instrumented(stages):
                    how: dict[str, Any] = {"method": method, "threads": 1, "scope": "all", "durable": False}
                    actmat.merge(places[0], places[1:], out=out, **how)
                if repeat:  # the first round is not counted
                    found.append(stages.seconds)
    rows: list[dict[str, Any]] = []
    for method, found in runs.items():
        whole = [1e9 * sum(seconds.values()) / entries for seconds in found]
        row = {"method": method, "passes": PASSES[method], "ns_per_entry": statistics.median(whole)}
        for stage in ("method", "draw"):
            row[f"{stage}_ns"] = statistics.median(1e9 * seconds.get(stage, 0.0) / entries for seconds in found)
        row["per_pass_ns"] = row["ns_per_entry"] / PASSES[method]
        rows.append(row | {"all_ns": whole})
        rows[-1]["times_average"] = row["per_pass_ns"] / rows[0]["per_pass_ns"]
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, experts=EXPERTS, entries=entries, load_before=load, columns=COLUMNS))


if __name__ == "__main__":
    main()
