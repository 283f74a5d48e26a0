"""Merges by a few inputs with the models on the device, from disk to disk, in processes of their own.

A random Llama of 7B in bfloat16 with adapters of rank 16 on all linear layers, and eight prompts of each: every expert
is measured and asked, the adapters are merged, and the answers compared. Columns end with seconds of the stages, of all
experts together; *without* is the same merge without inputs. The answers of random models mean nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import actmat
from actmat.progress import Progress
from benchmarks.adapters import write_adapters
from benchmarks.common import fresh, measure, once
from benchmarks.gpu.merges import QUICK, SIZES
from benchmarks.gpu.rows import arguments, give, peak_bytes, torch_device
from benchmarks.make_llama import make_family

NUMBERS = (2, 8)
RANK, PROMPTS, WORDS = 16, 8, 40


class StageSeconds(Progress):
    """Seconds by the first word of each stage."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stage, self._began = "reading", time.perf_counter()

    def doing(self, what: str, total: int = 0) -> None:
        """End one stage, begin the next."""
        now = time.perf_counter()
        self.seconds[f"{self._stage}_s"] += now - self._began
        self._stage, self._began = what.split()[0].strip(","), now


def write_prompts(folder: Path, experts: int, vocabulary: int) -> None:
    """Files of prompts, one for each expert, of words that the tokenizer of the base knows."""
    drawn = random.Random(0)
    for t in range(experts):
        texts = (" ".join(f"w{drawn.randrange(3, vocabulary)}" for _ in range(WORDS)) for _ in range(PROMPTS))
        (folder / f"prompts-{t}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def one_merge(device: str, folder: str, number: str, with_inputs: str) -> None:
    """Merge, and write facts that only this process knows beside the output."""
    place, watch = Path(folder), StageSeconds()
    adapters = {f"a{t}": place / f"adapter-{t}" for t in range(int(number))}
    data = {name: place / f"prompts-{t}.jsonl" for t, name in enumerate(adapters)} if with_inputs == "True" else None
    out, base = place / "out", place / "base"
    facts: dict[str, float] = {
        "merge_s": once(
            lambda: actmat.merge(base, adapters, out=out, data=data, to="peft", device=device, progress=watch)
        )
    }
    watch.doing("end")
    if data:
        facts |= watch.seconds
    if device.startswith("cuda"):
        facts["device_peak_b"] = peak_bytes(torch_device(device))
    (place / "facts.json").write_text(json.dumps(facts))


def main() -> None:
    """Print a row for each number of adapters, with inputs and without; of `DEVICE FOLDER NUMBER WITH`, merge."""
    if not sys.argv[1].startswith("-"):
        one_merge(*sys.argv[1:])
        return
    given = arguments()
    size = QUICK if given.quick else SIZES["7b"]
    folder = given.folder / "inputs"
    make_family(folder, size, 0, device="cpu" if given.device.startswith("cpu") else given.device)
    write_adapters(folder, max(NUMBERS), RANK, size.hidden, size.intermediate, size.layers)
    write_prompts(folder, max(NUMBERS), size.vocabulary)
    for number in NUMBERS:
        for with_inputs in (True, False):
            fresh(folder / "out")
            words = (given.device, folder, str(number), str(with_inputs))
            run = measure([sys.executable, "-m", "benchmarks.gpu.inputs", *words], HF_HUB_OFFLINE="1")
            facts = json.loads((folder / "facts.json").read_text())
            row = {"wall_s": run.wall_s, "cpu_s": run.cpu_s, "host_peak_b": run.peak_anonymous_b, **facts}
            give(size="7b", what=f"{number} adapters, {'by inputs' if with_inputs else 'without'}", **row)
    shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
