"""Whole merges from disk to disk with one device, in processes of their own; mergekit beside them if it is there.

Random bfloat16 checkpoints of a Llama, made on the device. `device_peak_b` is the largest memory allocated on it,
`planned_b` what the plan says for the largest item; `difference` is the largest relative one of a tensor from the
same merge on the host. *two at once* are two merges that run at the same time on the device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Run, fresh, measure
from benchmarks.elementwise import RULES, largest_difference, mergekit_recipe
from benchmarks.gpu.rows import arguments, give
from benchmarks.make_llama import Size, make_family

HERE = Path(__file__).parent
SIZES = {"1.1b": Size(), "7b": Size(4096, 11008, 32, 32, 32, 32000)}
EXPERTS = {"1.1b": 3, "7b": 2}
QUICK = Size(hidden=64, intermediate=176, layers=2, heads=4, key_value_heads=4, vocabulary=1000)
MERGES = {
    "1.1b": [
        ("actmat_ridge", "device"), ("actmat", "device"), ("average", "host"), ("ties", "host"), ("tsv", "device"),
        ("dc_merge", "device"), ("actmat_ridge", "host"),
    ],
    "7b": [("actmat_ridge", "device"), ("average", "host")],
}  # fmt: skip
MAKING_S = 100
PEER = {"1.1b": ["average", "ties"], "7b": ["average"]}


class Merges:
    """All merges of one size.

    Args:
        size: its name.
        device: of the merges.
        folder: for checkpoints.
        quick: tiny checkpoints.
    """

    def __init__(self, size: str, device: str, folder: Path, *, quick: bool) -> None:
        self.size, self.device, self.folder = size, device, folder
        model = QUICK if quick else SIZES[size]
        model = dataclasses.replace(model, layers=self._layers(model))
        began = time.perf_counter()
        maker = "cpu" if device.startswith("cpu") else device
        self.base, self.experts = make_family(folder / f"llama-{size}", model, EXPERTS[size], device=maker)
        self.bytes = sum(f.stat().st_size for p in (self.base, *self.experts) for f in p.glob("*.safetensors"))
        os.sync()
        give(
            size=size, what="inputs made", wall_s=time.perf_counter() - began, stored_b=self.bytes, layers=model.layers
        )

    def _layers(self, model: Size) -> int:
        """Layers of a model of which the disk holds base, experts and output, and takes the inputs in `MAKING_S`."""
        files = EXPERTS[self.size] + 2
        free = shutil.disk_usage(self.folder).free - (3 << 30)
        piece, file = bytes(256 << 20), self.folder / "rate"
        began = time.perf_counter()
        with file.open("wb") as opened:
            for _ in range(1 if model == QUICK else 8):
                opened.write(piece)
            os.fsync(opened.fileno())
        rate = file.stat().st_size / (time.perf_counter() - began)
        file.unlink()
        model_b = min(free / files, rate * MAKING_S / (files - 1))
        return max(1, min(model.layers, int(model_b / (2 * model.parameters()) * model.layers)))

    def merge(self, method: str, where: str, mark: str = "") -> tuple[Run, dict[str, Any], Path]:
        """One merge in a process of its own."""
        out = fresh(self.folder / "out" / f"{method}-{where}{mark}")
        facts = self.folder / f"facts{mark}.json"
        words = [sys.executable, "-m", "benchmarks.gpu.merge", method, self.device if where == "device" else "cpu"]
        run = measure([*words, facts, out, self.base, *self.experts], None, HF_HUB_OFFLINE="1")
        return run, json.loads(facts.read_text()), out

    def all_merges(self, merges: Sequence[tuple[str, str]]) -> None:
        """A row per merge, and the difference where the host has merged it too."""
        for method, where in merges:
            run, facts, out = self.merge(method, where)
            row = {"size": self.size, "what": f"{method} ({where})", "wall_s": run.wall_s, **facts}
            row |= {"cpu_s": run.cpu_s, "host_peak_b": run.peak_anonymous_b}
            give(**row)
            other = out.with_name(f"{method}-device")
            if where == "host" and other.exists():
                give(size=self.size, what=f"{method} (device)", difference=largest_difference(other, out))
            if where == "host" or (method, "host") not in MERGES[self.size]:
                shutil.rmtree(out)

    def two_at_once(self) -> None:
        """Two merges on one device at the same time."""
        with ThreadPoolExecutor(2) as pool:
            pairs = list(pool.map(lambda mark: self.merge("actmat_ridge", "device", mark), ("-a", "-b")))
        same = largest_difference(pairs[0][2], pairs[1][2])
        wall = max(run.wall_s for run, _, _ in pairs)
        give(size=self.size, what="actmat_ridge, two at once (device)", wall_s=wall, difference=same)
        for _, _, out in pairs:
            shutil.rmtree(out)

    def peers(self) -> None:
        """mergekit on the same inputs."""
        for name in PEER[self.size]:
            recipe = mergekit_recipe(RULES[name], self.base, self.experts, "bfloat16", "bfloat16")
            file, out = self.folder / "peer.json", fresh(self.folder / "out" / f"{name}-mergekit")
            file.write_text(json.dumps(recipe))
            command = [sys.executable, HERE / "peer.py", file, out, "cpu" if self.device[:3] == "cpu" else "cuda"]
            try:
                run = measure(command, None, HF_HUB_OFFLINE="1")
            except RuntimeError as error:  # what fails in the peer is no failure of this program
                give(size=self.size, what=f"mergekit {name}", outcome=str(error)[-300:])
                continue
            found = {"wall_s": run.wall_s, "cpu_s": run.cpu_s, "host_peak_b": run.peak_anonymous_b}
            give(size=self.size, what=f"mergekit {name}", **found)
            shutil.rmtree(out)


def main() -> None:
    """Print a row per merge."""
    given = arguments(size=SIZES)
    merges = Merges(given.size, given.device, given.folder, quick=given.quick)
    merges.all_merges(MERGES[given.size][:4])
    if importlib.util.find_spec("mergekit"):
        merges.peers()
    if given.size == "1.1b":
        merges.two_at_once()
        merges.all_merges(MERGES[given.size][4:])
    shutil.rmtree(given.folder / f"llama-{given.size}")
    shutil.rmtree(given.folder / "out")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
