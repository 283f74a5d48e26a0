"""Small image tasks and models for the tests of the vision experiments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TINY = {
    "train": "40",
    "validation": "8",
    "test": "20",
    "hidden_size": "16",
    "intermediate_size": "24",
    "num_hidden_layers": "1",
    "num_attention_heads": "2",
    "base_epochs": "1",
    "epochs": "2",
    "lora_epochs": "2",
    "batch_size": "16",
    "rank": "2",
    "samples": "16",
}
"""Settings of `vision-small` for a run of seconds."""


def arrays(seed: int, classes: int, n: int, gray: bool) -> dict[str, np.ndarray]:
    """Images that can be told apart: every class has a pattern of its own, under noise."""
    rng = np.random.default_rng(seed)
    shape = (28, 28) if gray else (32, 32, 3)
    patterns = rng.integers(0, 200, (classes, *shape))
    found = {}
    for part, size in (("train", n), ("test", n // 2)):
        labels = np.arange(size) % classes
        noise = rng.integers(0, 56, (size, *shape))
        found[f"x_{part}"] = (patterns[labels] + noise).astype(np.uint8)
        found[f"y_{part}"] = labels.astype(np.int64)
    return found | {"class_names": np.array([f"kind {i}" for i in range(classes)])}


def write_tasks(folder: Path, names: tuple[str, ...], n: int = 60) -> Path:
    """A folder of `.npz` tasks; every second one is gray, with 2, 3, 4, ... classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        np.savez(folder / f"{name}.npz", **arrays(i, 2 + i % 3, n, gray=i % 2 == 1))
    return folder


def write_clip(folder: Path, size: int = 32) -> Path:
    """A tiny CLIP with its tokenizer: every character is a token."""
    import torch
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    folder.mkdir(parents=True)
    letters = [chr(c) for c in range(33, 127)]
    tokens = [*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **sizes,
        "vocab_size": len(tokens),
        "max_position_embeddings": 128,
        "bos_token_id": 188,
        "eos_token_id": 189,
    }
    config = CLIPConfig(
        text_config={**text, "bos_token_id": 188, "eos_token_id": 189, "pad_token_id": 189},
        vision_config={**sizes, "image_size": size, "patch_size": 16},
        projection_dim=12,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)
    return folder
