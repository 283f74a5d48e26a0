"""Small image tasks and models for the tests of the vision experiments."""

from __future__ import annotations

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
