"""Which weight format a list of file names holds, and what to say about the formats that are not read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from actmat.errors import CheckpointError

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "NOT_WEIGHTS", "TORCH_SUFFIXES", "foreign_format", "weight_format"]

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NOT_WEIGHTS = (
    *ADAPTER_WEIGHTS,
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scheduler.bin",
    "rng_state.pth",
    "scaler.pt",
)
"""Files of training beside the weights, which end like weights."""

FOREIGN = {
    ".gguf": "a GGUF file: quantised or laid out for llama.cpp",
    ".ggml": "a GGML file: quantised or laid out for llama.cpp",
    ".h5": "a TensorFlow checkpoint",
    ".ckpt.index": "a TensorFlow checkpoint",
    ".msgpack": "a Flax checkpoint",
    ".onnx": "an ONNX graph",
    ".npz": "a NumPy archive",
    ".tflite": "a TensorFlow Lite graph",
}
"""Endings of weight files of other formats -> what they are."""

CONVERT = "Fix: load it with its own library and save it as safetensors (save_pretrained)."


def weight_format(names: Iterable[str], location: str) -> Literal["safetensors", "torch"]:
    """Format of the weights among the file names of a folder or a hub repository; safetensors come first.

    Raises:
        CheckpointError: an adapter, a foreign format, or no weights at all.
    """
    names = sorted(names)
    weights = [n for n in names if n not in NOT_WEIGHTS]
    if any(n.endswith((".safetensors", ".safetensors.index.json")) for n in weights):
        return "safetensors"
    if any(n.endswith((*TORCH_SUFFIXES, ".bin.index.json")) for n in weights):
        return "torch"
    if ADAPTER_CONFIG in names or any(n in ADAPTER_WEIGHTS for n in names):
        raise CheckpointError(
            f"{location}: expected a full checkpoint, found a PEFT adapter ({ADAPTER_CONFIG}). Fix: give it where an "
            "adapter is accepted, or fold it into its base first (PeftModel.merge_and_unload, save_pretrained)."
        )
    foreign = [f"{n} is {foreign_format(n)}" for n in names if foreign_format(n)]
    if foreign:
        raise CheckpointError(f"{location}: no weights in a supported format: {'; '.join(foreign[:3])}. {CONVERT}")
    raise CheckpointError(
        f"{location}: expected weights (*.safetensors, pytorch_model.bin, *.pt, *.pth), found "
        f"{', '.join(names[:6]) or 'an empty folder'}{', ...' if len(names) > 6 else ''}. Likely cause: the wrong "
        "folder, or a download of the config alone. Fix: give the folder that holds the weights."
    )


def foreign_format(name: str) -> str:
    """What a file of another format is, by its ending; empty for any other file."""
    return next((what for suffix, what in FOREIGN.items() if name.endswith(suffix)), "")
