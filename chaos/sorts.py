"""Inputs on disk, and the sorts of output that are made of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from chaos.searches import search_command

WIDTH, LAYERS, RANK = 16, 6, 2
REPLACED = "replaced"
"""Folder of the output that `--overwrite` replaces."""


@dataclass(frozen=True)
class Sort:
    """A sort of output.

    Args:
        name: of the sort.
        flags: of the command.
        inputs: "checkpoints", "adapters", or "base and adapters".
        verb: "merge", "extract" of a model, or "tune", which refuses to write what it finished.
        replaces: another output is in its place, which `--overwrite` replaces.
    """

    name: str
    flags: tuple[str, ...] = ()
    inputs: str = "checkpoints"
    verb: str = "merge"
    replaces: bool = False


_SORTS = (
    Sort("model", ("--threads", "1")),
    Sort("two threads", ("--threads", "2")),
    Sort("sharded", ("--set", "max_shard_size=4kB", "--threads", "2")),
    Sort("variants", ("-m", "average", "-m", "ties", "-o", "density=0.2,0.5", "--threads", "1")),
    Sort("diagnosed", ("--diagnose", "--threads", "1")),
    Sort("other dtype", ("--dtype", "bfloat16", "-m", "dare")),
    Sort("adapter", ("--threads", "1"), inputs="adapters"),
    Sort("adapters into a model", ("--threads", "2"), inputs="base and adapters"),
    Sort("overwrite", ("--overwrite", "--threads", "1"), replaces=True),
    Sort("model, devices", ("--device", "cpu:0,1", "--threads", "1")),
    Sort("extraction", ("--rank", "4", "--threads", "1"), verb="extract"),
    Sort("tune", verb="tune"),
)
SORTS = {s.name: s for s in _SORTS}
"""Every sort of output."""


def save_checkpoints(root: Path, base: dict[str, torch.Tensor], rng: torch.Generator) -> None:
    """Save these square tensors as `base`, and with noise as the experts `one` and `two`."""
    for folder in ("base", "one", "two"):
        (root / folder).mkdir(parents=True)
        width = len(next(iter(base.values())))
        (root / folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": width}))
        (root / folder / "tokenizer.json").write_text("{}")
        noise = 0.0 if folder == "base" else 0.1
        tensors = {n: t + noise * torch.randn(t.shape, generator=rng) for n, t in base.items()}
        save_file(tensors, root / folder / "model.safetensors", {"format": "pt"})


def make_inputs(root: Path) -> None:
    """A base, two experts of it, and two adapters."""
    rng = torch.Generator().manual_seed(0)
    names = ["embed_tokens.weight", *(f"layers.{i}.{n}_proj.weight" for i in range(LAYERS) for n in ("q", "up"))]
    base = {f"model.{n}": torch.randn(WIDTH, WIDTH, generator=rng) for n in names}
    save_checkpoints(root, base, rng)
    for folder in ("lora-one", "lora-two"):
        (root / folder).mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "up_proj"]}
        (root / folder / "adapter_config.json").write_text(json.dumps(config))
        factors = {}
        for name in base:
            if "_proj" in name:
                stem = "base_model.model." + name.removesuffix(".weight")
                factors[f"{stem}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=rng)
                factors[f"{stem}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=rng)
        save_file(factors, root / folder / "adapter_model.safetensors", {"format": "pt"})


def command(root: Path, sort: Sort, out: Path) -> list[str]:
    """Arguments of `actmat` for one sort of output."""
    if sort.verb == "tune":
        return search_command(root, out)
    if sort.verb == "extract":
        inputs = ["-b", str(root / "base"), "--model", str(root / "one")]
        return ["extract", *inputs, "--out", str(out), "--quiet", *sort.flags]
    names = ("one", "two") if sort.inputs == "checkpoints" else ("lora-one", "lora-two")
    base = [] if sort.inputs == "adapters" else ["-b", str(root / "base")]
    experts = [a for name in names for a in ("-e", str(root / name))]
    return ["merge", *base, *experts, "--out", str(out), "--quiet", *sort.flags]


def prepare(root: Path, sort: Sort, out: Path) -> None:
    """Put the output that is to be replaced in its place; once for all runs."""
    if sort.replaces and not out.exists():
        shutil.copytree(root / REPLACED, out)


def untouched(root: Path) -> dict[str, bytes]:
    """Every file of the inputs, which no command may change."""
    folders = (p for p in root.iterdir() if p.name.startswith(("base", "one", "two", "lora-", "llama", REPLACED)))
    return {str(p.relative_to(root)): p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}


def contents(out: Path) -> dict[str, bytes]:
    """Every file below an output, without those of unfinished merges; manifests and reports without times."""
    files = {str(p.relative_to(out)): p for p in sorted(out.rglob("*")) if p.is_file()}
    return {name: _timeless(path) for name, path in files.items() if ".actmat-" not in name}


def weights(found: dict[str, bytes]) -> dict[str, bytes]:
    """The files of weights among the `contents`; the others tell on what they were made."""
    return {name: data for name, data in found.items() if name.endswith(".safetensors")}


def _timeless(path: Path) -> bytes:
    if path.name not in ("actmat_manifest.json", "report.json", "report.html"):
        return path.read_bytes()
    if path.suffix == ".html":
        return b""  # drawn from report.json
    data = json.loads(path.read_bytes())
    for part in (data, *data.get("tensors", ()), *data.get("modules", ())):
        for key in ("timing", "seconds", "stages", "out", "created"):
            part.pop(key, None)
    return json.dumps(data, sort_keys=True).encode()


def leftovers(place: Path) -> list[str]:
    """Hidden files and folders of unfinished merges."""
    return sorted(str(p.relative_to(place)) for p in place.rglob(".*.actmat-*"))
