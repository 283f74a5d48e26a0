"""Time, memory and disk of a default `actmat tune` of three LoRA adapters on a model of SmolLM2-135M's shape.

    python -m benchmarks.tune.speed --label now          # adds or replaces the row `now` of results/tune-speed.json

Weights are random, which changes no time: a dozen prompts per task, continued by 32 tokens. Disk is what the output and
its work folder hold together at most; it and memory are sampled every second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import (
    RESULTS,
    WORK,
    actmat_command,
    family,
    fresh,
    memory_bytes,
    print_table,
    write_result,
)
from benchmarks.make_llama import Size, noise, write_checkpoint
from benchmarks.provenance import commit

TASKS = ("math", "code", "law")
PROMPTS = 12
RANK = 16
FILE = RESULTS / "tune-speed.json"
SAMPLE_S = 1.0


@dataclass(frozen=True)
class Tied(Size):
    """SmolLM2-135M's shape: its head is its table of embeddings."""

    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    key_value_heads: int = 3
    vocabulary: int = 49152

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, without the head."""
        return {name: shape for name, shape in super().tensors().items() if name != "lm_head.weight"}

    def config(self, dtype: str) -> dict[str, object]:
        """Contents of `config.json`."""
        return super().config(dtype) | {"tie_word_embeddings": True}


def write_inputs(folder: Path, size: Size) -> None:
    """`base`, and an adapter and a file of prompts for each task, unless they are there."""
    if (folder / "complete").is_file():
        return
    write_checkpoint(fresh(folder) / "base", size)
    for number, task in enumerate(TASKS):
        write_adapter(folder / task, size, number)
        rng = torch.Generator().manual_seed(number)
        lengths = torch.randint(16, 64, (PROMPTS,), generator=rng).tolist()
        texts = [
            " ".join(f"w{n}" for n in torch.randint(3, size.vocabulary, (length,), generator=rng)) for length in lengths
        ]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "complete").touch()


def write_adapter(folder: Path, size: Size, seed: int) -> None:
    """A LoRA adapter of all linear layers."""
    folder.mkdir(parents=True)
    tensors = {}
    shapes = {n: s for n, s in size.tensors().items() if n.endswith("_proj.weight")}
    for name, (rows, columns) in shapes.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = noise(f"{name}A", (RANK, columns), seed) / columns**0.5
        tensors[f"{stem}.lora_B.weight"] = noise(f"{name}B", (rows, RANK), seed) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    config |= {"target_modules": sorted({n.split(".")[-2] for n in shapes}), "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def disk_of(*folders: Path) -> int:
    """Bytes of all files in folders; those that vanish meanwhile count nothing."""
    total = 0
    for path in (p for folder in folders if folder.exists() for p in folder.rglob("*")):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def tuned(folder: Path, out: Path, more: list[str]) -> dict[str, Any]:
    """One search, measured from outside."""
    fresh(out)
    work = fresh(out.with_name(f"{out.name}.tune"))
    inputs = [x for t in TASKS for x in ("-e", f"{t}={folder / t}", "--data", f"{t}={folder / f'{t}.jsonl'}")]
    command = [*actmat_command(), "tune", "-b", folder / "base", *inputs, "--out", out, *more]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = disk = 0
    with subprocess.Popen(list(map(str, command))) as child:
        while child.poll() is None:  # seldom: the machine has two cores
            time.sleep(SAMPLE_S)
            memory = max(memory, sum(memory_bytes(pid).get("RssAnon", 0) for pid in family(child.pid)))
            disk = max(disk, disk_of(out.parent))
    wall, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode:
        raise RuntimeError(f"exit status {child.returncode} of {command}")
    report = json.loads((work / "tune.json").read_text())
    methods = {t["method"] + (f"@{s}" if (s := t.get("space")) else "") for t in report["trials"]}
    return {
        "commit": commit(),
        "threads": os.environ.get("OMP_NUM_THREADS", "the library's choice"),
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_anonymous_b": memory,
        "disk_b": disk,
        "merges": len(methods),
        "trials": len(report["trials"]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="name of the row")
    parser.add_argument("--folder", type=Path, default=WORK / "tune-speed")
    parser.add_argument("more", nargs="*", help="further flags of `actmat tune`, after `--`")
    given = parser.parse_args()
    write_inputs(given.folder / "inputs", Tied())
    row = {"search": given.label, **tuned(given.folder / "inputs", given.folder / "out" / "best", given.more)}
    rows = json.loads(FILE.read_text())["rows"] if FILE.is_file() else []
    rows = [r for r in rows if r["search"] != given.label] + [row]
    print_table(rows, list(row))
    write_result("tune-speed", rows, FILE)


if __name__ == "__main__":
    main()
