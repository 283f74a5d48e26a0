"""Cases of the ledger by documented functions; each takes the folder of its output and returns what it computed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Values = dict[str, Any]
"""Name -> tensor, or a number."""


def average(out: Path, weights: str) -> Values:
    """Average checkpoints of a run."""
    import actmat

    actmat.average(["llama/expert1", "llama/expert2", "llama/expert3"], weights=weights, out=out / "out")
    return {}


def merge_modules(out: Path) -> Values:
    """Merge modules, and state dicts."""
    from transformers import AutoModelForCausalLM

    import actmat

    base, *experts = (AutoModelForCausalLM.from_pretrained(f"gpt2/{n}") for n in ("base", "expert1", "expert2"))
    values = {f"modules {n}": t for n, t in actmat.merge(base, experts, method="actmat", threads=1).tensors.items()}
    states = [m.state_dict() for m in (base, *experts)]
    merged = actmat.merge(states[0], states[1:], method="ties", options={"density": 0.4}, threads=1)
    return values | {f"states {n}": t for n, t in merged.tensors.items()}


def merge_peft(out: Path) -> Values:
    """Merge adapters of a `PeftModel` in memory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import actmat

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("peft/base_llama"), "peft/lora1", "one")
    model.load_adapter("peft/lora3", "three")
    merged = actmat.merge_adapters(model, ["one", "three"], name="both", method="actmat", threads=1)
    trained = {f"model {n}": p.detach() for n, p in model.named_parameters() if ".both." in n}
    return dict(merged.tensors) | trained


def merge_by_function(out: Path) -> Values:
    """Merge by a function of the user."""
    import actmat

    def first_and_last(deltas: Any) -> Any:
        return deltas[0] * 2 - deltas[-1]

    experts = ["llama/expert1", "llama/expert2"]
    actmat.merge("llama/base", experts, method=first_and_last, out=out / "out", threads=1)
    return {}


def merge_layers(out: Path) -> Values:
    """Merge deltas of one layer, and factors in every space."""
    import torch

    from actmat import merge_matrices

    rng = torch.Generator().manual_seed(0)
    factors = [(torch.randn(20, r, generator=rng), torch.randn(r, 14, generator=rng)) for r in (2, 3, 3)]
    equal = [(torch.randn(20, 3, generator=rng), torch.randn(3, 14, generator=rng)) for _ in range(3)]
    deltas = [torch.randn(20, 14, generator=rng) for _ in range(3)]
    values = {}
    for method in ("actmat", "ties", "tsv", "dare", "ct_merging", "knots"):
        values[method] = merge_matrices(method, deltas, post=["mean_norm"])
        values[f"{method} half"] = merge_matrices(method, [d.bfloat16() for d in deltas])
        if method != "knots":
            values[f"{method} core"] = merge_matrices(method, factors, space="core")
    values["factors"] = merge_matrices("ties", equal, space="factors")
    values["pico"] = merge_matrices("dc_merge", factors, space="pico", post=["isotropize"])
    return values


class _Killer:
    """Progress of a merge that kills the process at a call; before it, as many calls as that."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __getattr__(self, name: str) -> Any:
        return self._count

    def _count(self, *values: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(out: Path, recipe: Mapping[str, Any]) -> Values:
    """Kill a merge at its fifth call of progress, in a process of its own, then finish it."""
    import actmat

    text = json.dumps([dict(recipe), str(out / "out")])
    killed = subprocess.run([sys.executable, "-m", __name__, text], capture_output=True, text=True, check=False)
    if killed.returncode != -signal.SIGKILL or (out / "out").exists() or not any(out.iterdir()):
        raise RuntimeError(f"expected a merge that was killed midway, found exit {killed.returncode}: {killed.stderr}")
    if not actmat.merge(**recipe, out=out / "out", threads=1).resumed:
        raise RuntimeError("expected a merge that resumes, found one that began anew")
    return {}


if __name__ == "__main__":
    import actmat

    fields, place = json.loads(sys.argv[1])
    actmat.merge(**fields, out=place, threads=1, progress=_Killer(5))  # type: ignore[arg-type]  # any call counts
