"""What does the merge of a 7 B model cost? Peak memory, wall time and bytes, beside what the plan announces.

    python -m benchmarks.seven_b                                  # layers of OLMo-3-7B's shape, 12 GiB of disk
    python -m benchmarks.seven_b --device cuda --measure 32       # the whole model, 70 GiB of disk

Models of that shape with few layers are merged and measured; time and bytes grow by the same amount with every layer,
so a line through two numbers of layers gives those of all `--of` layers (rows `extrapolated`). The peak does not grow
with layers: it is that of the largest tensors, which are all there. `estimate` is what `actmat plan` says, for the
whole model from headers alone: its files are made with their full length, but as holes that take no room on the disk.

Weights are random, deltas are random changes of `--change` of their size; rules that decompose find flat spectra.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, WORK, actmat_command, announced, fresh, markdown, measure, write_result
from benchmarks.make_llama import DTYPES, Size, add_size_arguments, home, make_family, size_from

OLMO = Size(hidden=4096, intermediate=11008, layers=32, heads=32, key_value_heads=32, vocabulary=100278)
COLUMNS = ("method", "layers", "what", "wall_s", "peak_anonymous_b", "estimate_b", "read_b", "write_b")
WORKERS = {1: "one_worker", 2: "two_workers"}
SOURCE = str(HERE.parent / "src")
DTYPE = "bfloat16"


def hollow(folder: Path, size: Size) -> Path:
    """A checkpoint of which only the headers are real: a hole stands for the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, code = DTYPES[DTYPE]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in size.tensors().items():
        end = offset + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(size.config(DTYPE)))
    return folder


def arguments_of(base: Path, experts: Sequence[Path], method: str, device: str) -> list[str | Path]:
    """Flags that `plan` and `merge` share."""
    found: list[str | Path] = ["--base", base, "--method", method, "--device", device]
    for expert in experts:
        found += ["--expert", expert]
    return found


def merged(method: str, size: Size, given: argparse.Namespace) -> dict[str, Any]:
    """One merge, foretold and measured."""
    folder = home(given.work, size, DTYPE)
    base, experts = make_family(folder, size, given.experts, dtype=DTYPE, change=given.change)
    flags = arguments_of(base, experts, method, given.device)
    foretold = announced(flags)
    out = fresh(given.work / "out" / f"seven-b-{method}")
    run = measure(
        [*actmat_command(), "merge", *flags, "--out", out, "--threads", str(given.threads), "--quiet"],
        out,
        PYTHONPATH=SOURCE,
    )
    fresh(out)
    return {
        "method": method,
        "layers": size.layers,
        "what": "measured",
        "wall_s": run.wall_s,
        "peak_anonymous_b": run.peak_anonymous_b,
        "estimate_b": foretold[f"peak_bytes_{WORKERS[given.threads]}"],
        "read_b": foretold["read_bytes"],
        "write_b": foretold["write_bytes"],
    }


def extrapolated(rows: Sequence[dict[str, Any]], size: Size, given: argparse.Namespace) -> dict[str, Any]:
    """The whole model from the line through the fewest and the most layers; estimate and bytes from its headers."""
    few, many = min(rows, key=lambda r: r["layers"]), max(rows, key=lambda r: r["layers"])
    folder = given.work / "hollow"
    names = ["base", *(f"expert-{t}" for t in range(given.experts))]
    base, *experts = (hollow(folder / name, size) for name in names)
    foretold = announced(arguments_of(base, experts, few["method"], given.device))
    return {
        "method": few["method"],
        "layers": size.layers,
        "what": "extrapolated",
        "wall_s": on_line(few, many, "wall_s", size.layers),
        "peak_anonymous_b": max(r["peak_anonymous_b"] for r in rows),
        "estimate_b": foretold[f"peak_bytes_{WORKERS[given.threads]}"],
        "read_b": foretold["read_bytes"],
        "write_b": foretold["write_bytes"],
    }


def on_line(few: dict[str, Any], many: dict[str, Any], what: str, layers: int) -> float:
    """The value at `layers` of the line through two rows."""
    slope = (many[what] - few[what]) / (many["layers"] - few["layers"])
    return float(few[what] + slope * (layers - few["layers"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size_arguments(parser, OLMO, leave_out="layers")
    parser.add_argument("--measure", type=int, nargs="+", default=[1, 3], help="numbers of layers to merge")
    parser.add_argument("--of", type=int, default=OLMO.layers, help="layers of the whole model")
    parser.add_argument("--methods", nargs="+", default=["actmat", "tsv"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--change", type=float, default=1e-2, help="size of a delta relative to the weights")
    parser.add_argument("--threads", type=int, choices=sorted(WORKERS), default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints")
    parser.add_argument("--name", default="seven_b", help="name of the result file")
    given = parser.parse_args()
    rows = []
    for method in given.methods:
        found = [merged(method, replace(size_of(given), layers=n), given) for n in sorted(set(given.measure))]
        rows += found
        if len(found) > 1 and given.of not in given.measure:
            rows.append(extrapolated(found, replace(size_of(given), layers=given.of), given))
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, columns=COLUMNS, device=given.device))


def size_of(given: argparse.Namespace) -> Size:
    """The size without its layers, which `--measure` and `--of` give."""
    return size_from(argparse.Namespace(**{**vars(given), "layers": 1}))


if __name__ == "__main__":
    main()
