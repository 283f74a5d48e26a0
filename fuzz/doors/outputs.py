"""Doors of outputs that others edited: `verify`, `compare` and `diagnose` on tampered manifests and reports."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import actmat
from actmat.api.diagnosing import recipe_of_output
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.cli.verify import verify
from actmat.diagnostics.model import REPORT_NAME, read_diagnosis
from actmat.errors import MergeError
from actmat.extras.pages.commands.compare import compare
from actmat.extras.pages.html import render_html
from actmat.recipe import recipe_yaml
from actmat.report.manifest import manifest_content, read_manifest
from fuzz.doors.folder import in_folder, printed, root, shows_table
from fuzz.draw import json_text, mutated_bytes, mutated_json
from fuzz.harness import Files, door


@cache
def _outputs() -> dict[str, Path]:
    """Two merged models and a merged adapter, made once before the process forks."""
    rng = torch.Generator().manual_seed(0)
    place = root() / "outputs"
    base = {f"model.layers.0.{n}_proj.weight": torch.randn(4, 4, generator=rng) for n in ("q", "v")}
    for name in ("base", "one", "two"):
        (place / name).mkdir(parents=True)
        noise = 0.0 if name == "base" else 0.1
        save_file({n: t + noise * torch.randn(4, 4, generator=rng) for n, t in base.items()},
                  place / name / "model.safetensors", {"format": "pt"})  # fmt: skip
        (place / name / "config.json").write_text('{"model_type": "llama"}')
    for name in ("lora-one", "lora-two"):
        (place / name).mkdir()
        (place / name / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        save_file({"base_model.model.q.lora_A.weight": torch.randn(2, 4, generator=rng),
                   "base_model.model.q.lora_B.weight": torch.randn(4, 2, generator=rng)},
                  place / name / "adapter_model.safetensors", {"format": "pt"})  # fmt: skip
    experts = [str(place / "one"), str(place / "two")]
    actmat.merge(base=str(place / "base"), experts=experts, out=str(place / "first"), diagnose=True)
    actmat.merge(base=str(place / "base"), experts=experts, out=str(place / "second"), method="ties", diagnose=True)
    actmat.merge(experts=[str(place / "lora-one"), str(place / "lora-two")], out=str(place / "adapter"))
    return {n: place / n for n in ("first", "second", "adapter")}


@cache
def _manifest(name: str) -> dict[str, Any]:
    return dict(json.loads((_outputs()[name] / MANIFEST_NAME).read_bytes()))


def _tampered(rng: random.Random, name: str) -> bytes:
    """A mutated manifest; half of them with the hash that belongs to it."""
    found = mutated_json(rng, _manifest(name))
    if rng.random() < 0.5 and isinstance(found, dict) and "content" in found:
        with contextlib.suppress(MergeError, ValueError):
            found["content"] = manifest_content(found)
    content = json.dumps(found, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutated_bytes(rng, content) if rng.random() < 0.1 else content


def _manifest_case(rng: random.Random) -> Files:
    return {MANIFEST_NAME: _tampered(rng, rng.choice(("first", "adapter")))}


def _read_manifest(folder: Path) -> str:
    read_manifest(folder)
    return recipe_yaml(recipe_of_output(folder))


def _verify_case(rng: random.Random) -> Files:
    name = rng.choice(("first", "adapter"))
    return {MANIFEST_NAME: _tampered(rng, name), "of": name.encode()}


@in_folder
def _verify(folder: Path) -> str:
    name = (folder / "of").read_text()
    (folder / "of").unlink()
    _place(folder, name)
    with printed() as out:
        verify(folder)
    return out.getvalue()


def _place(folder: Path, name: str) -> None:
    """Copy the other files of an output into the folder of its manifest; they are small."""
    for file in _outputs()[name].iterdir():
        if file.name != MANIFEST_NAME:
            (folder / file.name).write_bytes(file.read_bytes())


def _compare_case(rng: random.Random) -> Files:
    return {MANIFEST_NAME: _tampered(rng, "first")}


@in_folder
def _compare(folder: Path) -> str:
    _place(folder, "first")
    with printed() as out:
        compare(folder, _outputs()["second"], json=not shows_table(folder))
    return out.getvalue()


@cache
def _report() -> dict[str, Any]:
    return dict(json.loads((_outputs()["first"] / REPORT_NAME).read_bytes()))


def _report_case(rng: random.Random) -> Files:
    return {REPORT_NAME: json_text(rng, _report())}


def _read_report(folder: Path) -> None:
    diagnosis = read_diagnosis(folder)
    if shows_table(folder):
        render_html(diagnosis)


door("manifests", _manifest_case, in_folder(_read_manifest))
door("verify", _verify_case, _verify)
door("compare", _compare_case, _compare)
door("reports", _report_case, in_folder(_read_report))
