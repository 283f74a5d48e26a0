"""Stand-ins for the parts of ComfyUI that the nodes use, with the signatures of its source (0.3.64)."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

COMMON = {"display_name", "optional", "tooltip", "lazy"}
WIDGET = COMMON | {"default", "socketless"}
NUMBER = WIDGET | {"min", "max", "step", "control_after_generate", "display_mode"}
INPUTS = {
    "MODEL": COMMON, "CLIP": COMMON, "VAE": COMMON, "BOOLEAN": WIDGET | {"label_on", "label_off"}, "INT": NUMBER,
    "FLOAT": NUMBER | {"round"}, "STRING": WIDGET | {"multiline", "placeholder", "dynamic_prompts", "force_input"},
    "COMBO": WIDGET | {"options", "control_after_generate", "upload", "image_folder", "remote"},
}  # fmt: skip
"""Keyword arguments of the inputs of each type."""


class Interrupted(Exception):
    """InterruptProcessingException of ComfyUI until 2025."""


class NewInterrupted(BaseException):
    """InterruptProcessingException of ComfyUI of 2026."""


def comfy_type(io_type: str) -> Any:
    """A type of the node API, whose inputs refuse keyword arguments that ComfyUI's would refuse."""

    class Input:
        def __init__(self, id: str, **about: Any) -> None:
            unknown = set(about) - INPUTS.get(io_type, COMMON)
            assert not unknown, f"{io_type}.Input has no {unknown}"
            self.id, self.io_type, self.about = id, io_type, about

    class Output:
        def __init__(self, id: str, display_name: str | None = None, tooltip: str | None = None) -> None:
            self.id, self.io_type, self.display_name = id, io_type, display_name

    return types.SimpleNamespace(Input=Input, Output=Output)


@dataclass
class Schema:
    """A node's schema; ids are unique."""

    node_id: str
    display_name: str
    category: str
    inputs: list[Any]
    outputs: list[Any]
    description: str = ""
    is_output_node: bool = False

    def __post_init__(self) -> None:
        ids = [x.id for x in (*self.inputs, *self.outputs)]
        assert len(ids) == len(set(ids)), ids


class NodeOutput:
    """What a node returns."""

    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args, self.ui = args, ui


@dataclass
class Part:
    """A model or CLIP: its weights, by the names of LoRA modules."""

    weights: dict[str, torch.Tensor]

    @property
    def model(self) -> Part:
        return self

    @property
    def cond_stage_model(self) -> Part:
        return self


def known_names(part: Part, known: dict[str, str]) -> dict[str, str]:
    return known | {name: name for name in part.weights}


def load_lora(lora: dict[str, Any], known: dict[str, str], log_missing: bool = True) -> dict[str, torch.Tensor]:
    found = {}
    for name in known:
        if f"{name}.lora_up.weight" in lora:
            down, up = lora[f"{name}.lora_down.weight"], lora[f"{name}.lora_up.weight"]
            found[name] = lora[f"{name}.alpha"].double() / down.shape[0] * (up.double() @ down.double())
    return found


def load_lora_for_models(model: Any, clip: Any, lora: dict[str, Any], strength: float, strength_clip: float) -> Any:
    out = []
    for part, factor in ((model, strength), (clip, strength_clip)):
        deltas = {} if part is None else load_lora(lora, known_names(part, {}))
        new = None if part is None else Part({n: w + factor * deltas.get(n, 0) for n, w in part.weights.items()})
        out.append(new)
    return tuple(out)


def guess(file: str, output_vae: bool, output_clip: bool, embedding_directory: list[str]) -> Any:
    return (load_file(file), "clip" * output_clip, "vae" * output_vae, None)


@dataclass
class Comfy:
    """ComfyUI with its folders, the steps of its progress bar, and when it is interrupted."""

    root: Path
    steps: list[tuple[int, int]] = field(default_factory=list)
    interrupt_at: int | None = None
    interruption: type[BaseException] = Interrupted
    nodes: Any = None
    host: Any = None
    jobs: Any = None

    def folder(self, kind: str) -> Path:
        return self.root / "models" / kind

    def find(self, kind: str, name: str) -> str | None:
        path = self.folder(kind) / name
        return str(path) if path.is_file() else None

    def names(self, kind: str) -> list[str]:
        root = self.folder(kind)
        return sorted(str(p.relative_to(root)) for p in root.rglob("*.safetensors"))

    def save_path(self, prefix: str, root: str) -> tuple[str, str, int, str, str]:
        folder, stem = Path(root) / Path(prefix).parent, Path(prefix).name
        if not folder.resolve().is_relative_to(root):
            raise Exception("Saving image outside the output folder is not allowed.")  # as ComfyUI does
        folder.mkdir(parents=True, exist_ok=True)
        used = [int(p.name[len(stem) + 1 :].split("_")[0]) for p in folder.glob(f"{stem}_*.safetensors")]
        counter = 1 + max(used, default=0)
        return str(folder), stem, counter, str(Path(prefix).parent), prefix

    def check(self) -> None:
        if self.interrupt_at is not None and len(self.steps) >= self.interrupt_at:
            self.interrupt_at = None
            raise self.interruption

    def modules(self) -> dict[str, types.ModuleType]:
        comfy = self

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                self.total = total

            def update_absolute(self, value: int) -> None:
                comfy.steps.append((value, self.total))

        io = types.SimpleNamespace(
            **{n.capitalize(): comfy_type(n) for n in INPUTS}, Custom=comfy_type, Schema=Schema, NodeOutput=NodeOutput,
            ComfyNode=object,
        )  # fmt: skip
        ui = types.SimpleNamespace(PreviewText=lambda text: types.SimpleNamespace(as_dict=lambda: {"text": (text,)}))
        given: dict[str, dict[str, Any]] = {
            "folder_paths": {
                "get_filename_list": self.names, "get_full_path": self.find,
                "get_folder_paths": lambda kind: [str(self.folder(kind))],
                "get_temp_directory": lambda: str(self.root / "temp"), "get_save_image_path": self.save_path,
            },
            "comfy": {},
            "comfy.lora": {"model_lora_keys_unet": known_names, "model_lora_keys_clip": known_names,
                           "load_lora": load_lora},
            "comfy.lora_convert": {"convert_lora": lambda lora: lora},
            "comfy.model_management": {"throw_exception_if_processing_interrupted": self.check},
            "comfy.sd": {"load_lora_for_models": load_lora_for_models, "load_checkpoint_guess_config": guess},
            "comfy.utils": {"ProgressBar": ProgressBar, "load_torch_file": lambda f, safe_load: load_file(f)},
            "comfy_api": {},
            "comfy_api.latest": {"ComfyExtension": object, "io": io, "ui": ui},
        }  # fmt: skip
        made = {name: types.ModuleType(name) for name in given}
        for name, values in given.items():
            vars(made[name]).update(values)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, made[name])
        return made


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comfy]:
    """ComfyUI with the nodes imported into it."""
    found = Comfy(tmp_path)
    for kind in ("loras", "checkpoints"):
        found.folder(kind).mkdir(parents=True)
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    found.nodes = importlib.import_module("actmat_comfy.nodes")
    found.host, found.jobs = found.nodes.host, found.nodes.jobs
    yield found
    forget()


def forget() -> None:
    """The nodes keep ComfyUI's modules as they found them."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "actmat_comfy"]:
        del sys.modules[name]
