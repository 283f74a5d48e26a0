"""Inputs of `actmat tune`, tiny Llamas and texts, and what a search leaves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.helpers.llama import write_llama

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
TEXTS = {"math": ["one two", "three four", "seven", "two and two"], "code": ["def f", "for i in x", "x = 1", "f(x)"]}
NOISE = 0.2
"""Of the experts, so that they answer otherwise than their base."""
VOLATILE = ("seconds", "out")
"""Fields of `tune.json` that differ from run to run."""


def make_search_inputs(root: Path) -> None:
    """`llama`, `llama-math` and `llama-code`, and a file of texts for each expert."""
    write_llama(root / "llama", LLAMA)
    for seed, (name, texts) in enumerate(TEXTS.items()):
        write_llama(root / f"llama-{name}", LLAMA, expert=seed)
        file, rng = root / f"llama-{name}" / "model.safetensors", torch.Generator().manual_seed(seed)
        tensors = {k: (t + torch.randn(t.shape, generator=rng) * NOISE).to(t.dtype) for k, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


def search_command(root: Path, out: Path) -> list[str]:
    """Arguments of `actmat` for a search among a few candidates, for some of which statistics are measured."""
    argv = ["tune", "-b", str(root / "llama"), "--methods", "average,regmean", "--scales", "0.5,1", "--budget", "6"]
    for name in TEXTS:
        argv += ["-e", f"{name}={root / f'llama-{name}'}", "--data", f"{name}={root / f'{name}.jsonl'}"]
    return [*argv, "--set", "new_tokens=1", "--threads", "1", "--out", str(out), "--quiet"]


def search_contents(out: Path) -> dict[str, bytes]:
    """Files of `OUT.tune` as `search/NAME`, without times and places; of the journal, the trials that are whole."""
    work = out.with_name(f"{out.name}.tune")
    found = {}
    for path in sorted(p for p in work.rglob("*") if p.is_file() and ".actmat-" not in str(p)):
        data: Any = None
        if path.name == "tune.json":
            data = json.loads(path.read_bytes())
            data["recipe"].pop("out")
            for key in VOLATILE:
                data.pop(key)
        elif path.name == "recipe.yaml":
            data = yaml.safe_load(path.read_bytes())
            data.pop("out")
        elif path.name == "trials.jsonl":
            data = sorted(filter(None, map(_trial, path.read_text().splitlines())))
        place = str(path.relative_to(work))
        found[f"search/{place}"] = b"" if data is None else _placeless(data, out)
    return found


def _placeless(data: Any, out: Path) -> bytes:
    """JSON without the folder in which the search ran."""
    return json.dumps(data, sort_keys=True).replace(str(out.parent), "PLACE").encode()


def _trial(line: str) -> str:
    with contextlib.suppress(ValueError):
        return json.dumps(json.loads(line))
    return ""
