"""One merge in a process of its own: `python -m benchmarks.gpu.merge METHOD DEVICE FACTS OUT BASE EXPERT ...`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import actmat
from benchmarks.gpu.rows import peak_bytes, torch_device


def main() -> None:
    """Merge, and write what only this process can know to the file FACTS."""
    method, device, facts, out, base, *experts = sys.argv[1:]
    began = time.perf_counter()
    report = actmat.merge(base, experts, out=out, method=method, device=device)
    found = {"merge_s": time.perf_counter() - began, "on_device": len(report.plan.on_device)}
    if device != "cpu":
        found |= {"device_peak_b": peak_bytes(torch_device(device)), "planned_b": report.plan.peak_device_bytes}
    Path(facts).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
