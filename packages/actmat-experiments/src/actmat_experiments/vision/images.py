"""Tasks ready for an encoder: split, resized once, kept on disk, mapped into memory.

Shapes: `N` images, `S` pixels a side. Pixels are uint8 `N S S 3`; a batch for an encoder is float32 `N 3 S S`.

The validation part is a tenth of the published training part, 5,000 at most, drawn once: it does not depend on the seed
of a run, so that all seeds are judged alike. `limits` make all parts smaller, for machines that are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actmat.demo.training import generator_for
from actmat_experiments.harness.cache import Cache, file_digest, library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.tasks import majority_share
from actmat_experiments.vision.sources import RawTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Examples", "ImageTask", "Limits", "PixelScale", "load_task", "prepare_task", "split_indices"]

_VERSION = 1
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest number of examples per part; None for all."""

    train: int | None = None
    validation: int | None = None
    test: int | None = None


@dataclass(frozen=True, slots=True)
class PixelScale:
    """`(x / 255 - mean) / std`, per colour."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels_NSSC: NDArray[np.uint8]) -> Tensor:
        """uint8 `N S S 3` -> float32 `N 3 S S`."""
        import numpy as np

        x_NSSC = torch.from_numpy(np.array(pixels_NSSC)).float() / 255
        mean_C, std_C = torch.tensor(self.mean), torch.tensor(self.std)
        return ((x_NSSC - mean_C) / std_C).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Examples:
    """Pixels, mapped from disk, and the right answers."""

    pixels_NSSC: NDArray[np.uint8]
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    def head(self, n: int) -> Examples:
        """The first `n`; they were shuffled when the task was prepared."""
        return Examples(self.pixels_NSSC[:n], self.labels_N[:n])


@dataclass(frozen=True, slots=True)
class ImageTask:
    """A task of image classification; implements `harness.tasks.Task`.

    Args:
        name: of the task.
        class_names: what the labels mean.
        train, validation, test: its parts.
        content: part -> hash of pixels and labels.
    """

    name: str
    class_names: tuple[str, ...]
    train: Examples
    validation: Examples
    test: Examples
    content: Mapping[str, str]
    metric: str = "accuracy"

    @property
    def majority(self) -> tuple[int, int]:
        """See `harness.tasks.Task`."""
        return majority_share(self.train.labels_N.tolist(), self.test.labels_N.tolist())


def split_indices(n: int, name: str) -> tuple[list[int], list[int]]:
    """Training and validation positions of `n` published training examples: a tenth, 5,000 at most, is held out."""
    order = torch.randperm(n, generator=generator_for(0, f"split {name}")).tolist()
    held = min(n // 10, 5000)
    return order[held:], order[:held]


def prepare_task(cache: Cache, raw: RawTask, size: int, watch: Watch, limits: Limits | None = None) -> ImageTask:
    """The task at `size` pixels: shorter side resized (bicubic), centre cropped, by the image processor of CLIP."""
    limits = limits or Limits()
    key = {
        "version": _VERSION,
        "source": raw.identity,
        "name": raw.name,
        "classes": raw.class_names,
        "size": size,
        "limits": limits,
        "libraries": library_versions("pillow", "transformers"),
    }
    return load_task(cache.get("pixels", key, lambda out: _write(raw, size, limits, watch, out)))


def _write(raw: RawTask, size: int, limits: Limits, watch: Watch, out: Path) -> None:
    import numpy as np
    from numpy.lib.format import open_memmap
    from transformers import CLIPImageProcessorPil

    process = CLIPImageProcessorPil(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        do_rescale=False,
        do_normalize=False,
        do_convert_rgb=True,
    )
    fit, held = split_indices(len(raw.train.labels), raw.name)
    tested = torch.randperm(len(raw.test.labels), generator=generator_for(0, f"test {raw.name}")).tolist()
    order = {"train": fit[: limits.train], "validation": held[: limits.validation], "test": tested[: limits.test]}
    content = {}
    with watch.stage(f"images: {raw.name}", total=sum(map(len, order.values()))) as stage:
        for part, index in order.items():
            source = raw.test if part == "test" else raw.train
            pixels = open_memmap(out / f"{part}.npy", mode="w+", dtype=np.uint8, shape=(len(index), size, size, 3))
            for start in range(0, len(index), _BATCH):
                chunk = [source.image(i).convert("RGB") for i in index[start : start + _BATCH]]
                done = process(chunk, return_tensors="np", input_data_format="channels_last")["pixel_values"]
                pixels[start : start + len(chunk)] = np.moveaxis(np.asarray(done), 1, -1)
                stage.advance(len(chunk))
            pixels.flush()
            np.save(out / f"{part}_labels.npy", np.asarray([source.labels[i] for i in index], dtype=np.int64))
            content[part] = file_digest([out / f"{part}.npy", out / f"{part}_labels.npy"])
        stage.log(f"{raw.name}: {', '.join(f'{len(i)} {p}' for p, i in order.items())}")
    meta: dict[str, Any] = {"name": raw.name, "classes": raw.class_names, "content": content}
    (out / "task.json").write_text(json.dumps(meta), encoding="utf-8")


def load_task(folder: Path) -> ImageTask:
    """What `prepare_task` has written."""
    import numpy as np

    meta = json.loads((folder / "task.json").read_text(encoding="utf-8"))

    def part(name: str) -> Examples:
        labels = np.load(folder / f"{name}_labels.npy", allow_pickle=False)
        pixels = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return Examples(pixels, torch.from_numpy(labels))

    return ImageTask(
        name=meta["name"],
        class_names=tuple(meta["classes"]),
        train=part("train"),
        validation=part("validation"),
        test=part("test"),
        content=meta["content"],
    )
