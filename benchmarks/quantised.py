"""Merges of quantised checkpoints against a merge of the same shapes in bfloat16, from files to files.

    python -m benchmarks.quantised                 # about a minute, writes results/quantised.json

For every layout a base and two experts with codes drawn at random (and the bfloat16 ones with entries drawn at random)
are averaged by one thread of this process, in turn with the others, `--repeats` times each, synced. `cpu_s` is the
time of the processor, `times_bfloat16` its ratio to that of the plain merge, which a busy machine disturbs less than
the clock (`merge_s`). `times_floor` is `merge_s` against reading the inputs once and writing the output once, synced.
`peak_b` is the growth of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import actmat
from benchmarks.common import WORK, floor_seconds, fresh, memory_bytes, print_table, write_result

COLUMNS = ("layout", "output", "input_b", "merge_s", "cpu_s", "times_bfloat16", "times_floor", "peak_b")
HIDDEN, INNER, LAYERS = 1024, 2816, 3
SCALE = 0.02 / 100
INPUTS = ("base", "a", "b")

Parts = dict[str, Tensor]
Layout = tuple[Callable[[str, int, int, torch.Generator], Parts], Mapping[str, Any]]


def _whole(high: int, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=draw, dtype=torch.uint8)


def bfloat16(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """Plain entries."""
    return {name: torch.randn(rows, columns, generator=draw).mul_(0.02).bfloat16()}


def fp8(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """fp8 with a scale per block of 128 x 128."""
    codes = torch.randn(rows, columns, generator=draw).mul_(100).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": torch.full((-(-rows // 128), -(-columns // 128)), SCALE)}


def int4(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """`pack-quantized` with a scale per 32 columns."""
    words = _whole(256, (rows, columns // 2), draw).view(torch.int32)
    scale = torch.full((rows, columns // 32), 0.005, dtype=torch.bfloat16)
    return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor([rows, columns])}


def nvfp4(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """4-bit floats with an fp8 scale per 16 columns."""
    scale = torch.full((rows, columns // 16), 64.0).to(torch.float8_e4m3fn)
    return {f"{name}_packed": _whole(256, (rows, columns // 2), draw), f"{name}_scale": scale,
            f"{name}_global_scale": torch.tensor([8000.0])}  # fmt: skip


def mxfp4(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """MXFP4 of gpt-oss, stored transposed."""
    blocks = _whole(256, (columns, rows // 32, 16), draw)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full((columns, rows // 32), 120, dtype=torch.uint8)}


def gptq(name: str, rows: int, columns: int, draw: torch.Generator) -> Parts:
    """GPTQ of 4 bits with groups of 128, stored transposed."""
    stem, groups = name.removesuffix(".weight"), columns // 128
    return {
        f"{stem}.qweight": _whole(256, (columns // 8, 4 * rows), draw).view(torch.int32),
        f"{stem}.qzeros": _whole(256, (groups, rows // 2), draw).view(torch.int32),
        f"{stem}.scales": torch.full((groups, rows), 0.005, dtype=torch.float16),
        f"{stem}.g_idx": torch.arange(columns, dtype=torch.int32) // 128,
    }


PACKED_GROUP = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
LAYOUTS: dict[str, Layout] = {
    "bfloat16": (bfloat16, {}),
    "fp8 blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4 packed": (int4, {"quant_method": "compressed-tensors", "config_groups": PACKED_GROUP}),
    "NVFP4": (nvfp4, {"quant_method": "compressed-tensors"}),
    "MXFP4": (mxfp4, {"quant_method": "mxfp4"}),
    "GPTQ 4 bits": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
}
WRITTEN = ("fp8 blocks", "int4 packed", "MXFP4")
"""Layouts that `--quantise same` is measured for."""


def shapes(layers: int) -> Iterator[tuple[str, int, int]]:
    """Names, rows and columns of the matrices of so many layers of a decoder."""
    for k in range(layers):
        stem = f"model.layers.{k}"
        yield from ((f"{stem}.self_attn.{p}_proj.weight", HIDDEN, HIDDEN) for p in "qkvo")
        yield from ((f"{stem}.mlp.{p}_proj.weight", INNER, HIDDEN) for p in ("gate", "up"))
        yield f"{stem}.mlp.down_proj.weight", HIDDEN, INNER


def write_inputs(folder: Path, layout: Layout, layers: int) -> int:
    """Base and two experts; returns their bytes."""
    write, settings = layout
    total = 0
    for seed, name in enumerate(INPUTS):
        place = folder / name
        place.mkdir(parents=True)
        draw = torch.Generator().manual_seed(seed)
        tensors: Parts = {}
        for tensor, rows, columns in shapes(layers):
            tensors |= write(tensor, rows, columns, draw)
        save_file(tensors, place / "model.safetensors")
        config = {"model_type": "llama", "dtype": "bfloat16"}
        config |= {"quantization_config": dict(settings)} if settings else {}  # type: ignore[dict-item]
        (place / "config.json").write_text(json.dumps(config))
        total += (place / "model.safetensors").stat().st_size
    return total


def measured(work: Path, layers: int, repeats: int) -> list[dict[str, Any]]:
    """One row per layout and form of the output."""
    folders = {name: fresh(work / name.replace(" ", "-")) for name in LAYOUTS}
    sizes = {name: write_inputs(folders[name], layout, layers) for name, layout in LAYOUTS.items()}
    cases = [(name, same) for same in (False, True) for name in LAYOUTS if not same or name in WRITTEN]
    found: dict[tuple[str, bool], list[tuple[float, float, int]]] = {case: [] for case in cases}
    merge_once(folders["bfloat16"], same=False)  # imports
    for _ in range(repeats):
        for name, same in cases:
            found[name, same].append(merge_once(folders[name], same=same))
            print(name, same, found[name, same][-1], flush=True)
    plain = statistics.median(cpu for _, cpu, _ in found["bfloat16", False])
    rows = []
    for (name, same), runs in found.items():
        files = [folders[name] / p / "model.safetensors" for p in INPUTS]
        written = sizes[name if same else "bfloat16"] // len(INPUTS)
        merge_s, cpu_s = (statistics.median(r[k] for r in runs) for k in (0, 1))
        rows.append({
            "layout": name, "output": "codes" if same else "bfloat16", "input_b": sizes[name], "merge_s": merge_s,
            "cpu_s": cpu_s, "times_bfloat16": cpu_s / plain,
            "times_floor": merge_s / floor_seconds(files, written, work), "peak_b": max(r[2] for r in runs),
        })  # fmt: skip
    return rows


def merge_once(folder: Path, *, same: bool) -> tuple[float, float, int]:
    """Seconds of the clock and of the processor, and the growth of resident memory at its peak, of one merge."""
    out = fresh(folder / "out")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes(os.getpid())["VmRSS"]
    clock, processor = time.perf_counter(), time.process_time()
    actmat.merge(folder / "base", [folder / name for name in INPUTS[1:]], method="average", out=out, threads=1,
                 quantise="same" if same else None)  # fmt: skip
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return clock, processor, memory_bytes(os.getpid())["VmHWM"] - before


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows = measured(WORK / "quantised", given.layers, given.repeats)
    print_table(rows, COLUMNS)
    write_result("quantised", rows, columns=list(COLUMNS))
    fresh(WORK / "quantised")


if __name__ == "__main__":
    main()
