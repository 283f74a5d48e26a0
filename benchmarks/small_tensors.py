"""Is the plan's allowance per tensor true? Merges of thousands of small tensors, estimated and measured.

    python -m benchmarks.small_tensors

Each tensor has 16 entries, so that memory is a matter of their number. `per_tensor_kb` is the slope between few and
many tensors; `allowed_kb` is what the plan counts per tensor. `ratio` is measured / estimated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from actmat.planning.cost import ITEM_BYTES, SOURCE_BYTES
from benchmarks.common import WORK, actmat_command, fresh, markdown, measure, write_result
from benchmarks.memory import SOURCE, estimate

FEW, MANY, SIDE = 500, 20_000, 4
COLUMNS = (
    "method",
    "experts",
    "tensors",
    "estimate_b",
    "peak_anonymous_b",
    "ratio",
    "per_tensor_kb",
    "allowed_kb",
    "wall_s",
)


def make_inputs(place: Path, tensors: int, experts: int) -> list[str | Path]:
    """Arguments of a base and experts, made once."""
    rng = torch.Generator().manual_seed(0)
    arguments: list[str | Path] = []
    for name in ("base", *(f"expert-{t}" for t in range(experts))):
        folder = place / f"{tensors}-tensors" / name
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            found = {
                f"model.layers.{i}.mlp.up_proj.weight": torch.randn(SIDE, SIDE, generator=rng) for i in range(tensors)
            }
            save_file(found, folder / "model.safetensors", {"format": "pt"})
            (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": SIDE}))
        arguments += ["--base" if name == "base" else "--expert", folder]
    return arguments


def benchmark(method: str, tensors: int, experts: int) -> dict[str, Any]:
    """One merge with one worker, foretold and measured."""
    arguments = [*make_inputs(WORK / "small_tensors", tensors, experts), "--method", method]
    foretold = estimate(arguments, 1)
    out = fresh(WORK / "out" / f"small-tensors-{method}")
    run = measure(
        [*actmat_command(), "merge", *arguments, "--out", out, "--threads", "1", "--quiet"], out, PYTHONPATH=SOURCE
    )
    return {
        "method": method,
        "experts": experts,
        "tensors": tensors,
        "estimate_b": foretold,
        "peak_anonymous_b": run.peak_anonymous_b,
        "ratio": run.peak_anonymous_b / foretold,
        "wall_s": run.wall_s,
    }


def main() -> None:
    """Run all sizes and write benchmarks/results/small_tensors.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["average", "actmat"])
    parser.add_argument("--experts", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--tensors", type=int, default=MANY)
    parser.add_argument("--name", default="small_tensors")
    given = parser.parse_args()
    rows = []
    for method in given.methods:
        for experts in given.experts:
            few, many = (benchmark(method, n, experts) for n in (FEW, given.tensors))
            slope = (many["peak_anonymous_b"] - few["peak_anonymous_b"]) / (given.tensors - FEW)
            many |= {"per_tensor_kb": slope / 1000, "allowed_kb": (ITEM_BYTES + SOURCE_BYTES * experts) / 1000}
            rows += [few, many]
            print(markdown([many], COLUMNS), flush=True)
    print(write_result(given.name, rows, columns=COLUMNS))


if __name__ == "__main__":
    main()
