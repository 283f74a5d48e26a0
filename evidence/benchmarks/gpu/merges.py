"""Whole merges from disk to disk with one device, in processes of their own.

Random bfloat16 checkpoints of a Llama, made on the device. `device_peak_b` is the largest memory allocated on it,
`planned_b` what the plan says for the largest item; `difference` is the largest relative one of a tensor from the
same merge on the host. *two at once* are two merges that run at the same time on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import actmat
from benchmarks.common import Run, disk_rates, fresh, largest_difference, measure, once
from benchmarks.gpu.rows import arguments, give, peak_bytes, torch_device
from benchmarks.make_llama import Size, make_family

SIZES = {"1.1b": Size(), "7b": Size(4096, 11008, 32, 32, 32, 32000)}
EXPERTS = {"1.1b": 3, "7b": 2}
QUICK = Size(hidden=64, intermediate=176, layers=2, heads=4, key_value_heads=4, vocabulary=1000)
MERGES = {
    "1.1b": [
        ("actmat_ridge", "device"), ("actmat", "device"), ("average", "host"), ("ties", "host"), ("two at once", ""),
        ("tsv", "device"), ("dc_merge", "device"), ("actmat_ridge", "host"),
    ],
    "7b": [("actmat_ridge", "device"), ("average", "host")],
}  # fmt: skip
MAKING_S = 100


class Merges:
    """All merges of one size; the arguments are those of the program."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.size, self.device, self.folder = given.size, given.device, given.folder
        model = QUICK if given.quick else SIZES[given.size]
        model = dataclasses.replace(model, layers=self._layers(model))
        began = time.perf_counter()
        maker = "cpu" if self.device.startswith("cpu") else self.device
        self.inputs = self.folder / f"llama-{self.size}"
        self.base, self.experts = make_family(self.inputs, model, EXPERTS[self.size], device=maker)
        stored = sum(f.stat().st_size for p in (self.base, *self.experts) for f in p.glob("*.safetensors"))
        os.sync()
        self.give("inputs made", wall_s=time.perf_counter() - began, stored_b=stored, layers=model.layers)

    def give(self, what: str, **row: Any) -> None:
        """Print a row."""
        give(size=self.size, what=what, **row)

    def _layers(self, model: Size) -> int:
        """Layers of a model of which the disk holds base, experts and output, and takes the inputs in `MAKING_S`."""
        files = EXPERTS[self.size] + 2
        rate = disk_rates(self.folder, 1 << (24 if model == QUICK else 29))["disk_write_synced_gbps"]
        free = shutil.disk_usage(self.folder).free - (3 << 30)
        model_b = min(free / files, 1e9 * rate * MAKING_S / (files - 1))
        return max(1, min(model.layers, int(model_b / (2 * model.parameters()) * model.layers)))

    def run(self, method: str, where: str, mark: str = "") -> tuple[Run, Path]:
        """One merge in a process of its own, and its output; its facts lie beside it."""
        out = fresh(self.folder / "out" / f"{method}-{where}{mark}")
        words = [sys.executable, "-m", "benchmarks.gpu.merges", method, self.device if where == "device" else "cpu"]
        return measure([*words, out, self.base, *self.experts], HF_HUB_OFFLINE="1"), out

    def merge(self, method: str, where: str) -> None:
        """The row of a merge, and the difference where the host has merged it too."""
        run, out = self.run(method, where)
        facts = json.loads(out.with_suffix(".facts").read_text())
        row = {"wall_s": run.wall_s, **facts, "cpu_s": run.cpu_s, "host_peak_b": run.peak_anonymous_b}
        self.give(f"{method} ({where})", **row)
        other = out.with_name(f"{method}-device")
        if where == "host" and other.exists():
            self.give(f"{method} (device)", difference=largest_difference(other, out))
        if where == "host" or (method, "host") not in MERGES[self.size]:
            shutil.rmtree(out)

    def two_at_once(self) -> None:
        """Two merges on one device at the same time."""
        with ThreadPoolExecutor(2) as pool:
            (one, a), (other, b) = pool.map(lambda mark: self.run("actmat_ridge", "device", mark), ("-a", "-b"))
        wall = max(one.wall_s, other.wall_s)
        self.give("actmat_ridge, two at once (device)", wall_s=wall, difference=largest_difference(a, b))
        shutil.rmtree(a)
        shutil.rmtree(b)


def one_merge(method: str, device: str, out: str, base: str, *experts: str) -> None:
    """Merge, and write facts that only this process knows beside the output."""
    reports: list[actmat.MergeReport] = []
    seconds = once(lambda: reports.append(actmat.merge(base, experts, out=out, method=method, device=device)))
    plan = reports[0].plan
    found: dict[str, float] = {"merge_s": seconds, "on_device": len(plan.on_device)}
    if device != "cpu":
        planned = max(i.cost.device_bytes for i in plan.items)
        found |= {"device_peak_b": peak_bytes(torch_device(device)), "planned_b": planned}
    Path(out).with_suffix(".facts").write_text(json.dumps(found))


def main() -> None:
    """Print a row per merge; of `METHOD DEVICE OUT BASE EXPERT ...`, merge."""
    if not sys.argv[1].startswith("-"):
        one_merge(*sys.argv[1:])
        return
    merges = Merges(arguments(size=SIZES))
    for method, where in MERGES[merges.size]:
        merges.merge(method, where) if where else merges.two_at_once()
    shutil.rmtree(merges.inputs)
    shutil.rmtree(merges.folder / "out")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
