"""Names of files that are no weights of a full model, though they look like it, or are of formats that are not read."""

from __future__ import annotations

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "LORA_FILES", "NOT_WEIGHTS", "foreign_format"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
LORA_FILES = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
"""Names that diffusers gives to LoRA files without a config."""
_OF_TRAINING = "training_args.bin optimizer.pt optimizer.bin scheduler.pt scheduler.bin rng_state.pth scaler.pt"
NOT_WEIGHTS = (*ADAPTER_WEIGHTS, *_OF_TRAINING.split())
"""Files of adapters and of training, which have the suffixes of weights."""

FOREIGN = {
    ".ggml": "a GGML file: quantised or laid out for llama.cpp",
    ".h5": "a TensorFlow checkpoint",
    ".ckpt.index": "a TensorFlow checkpoint",
    ".msgpack": "a Flax checkpoint",
    ".onnx": "an ONNX graph",
    ".npz": "a NumPy archive",
    ".tflite": "a TensorFlow Lite graph",
}
"""Suffix of weight files in formats that are not read -> description."""


def foreign_format(name: str) -> str:
    """Description of a file in a format that is not read, by its suffix; empty for any other file."""
    return next((text for suffix, text in FOREIGN.items() if name.endswith(suffix)), "")
