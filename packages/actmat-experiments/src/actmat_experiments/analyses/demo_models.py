"""The models and data of a finished `actmat demo`, for analyses of real training.

Shapes: `N` images, `H = W` pixels, `I` in_features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from actmat.demo.heads import Head, load_heads
from actmat.demo.model import Encoder, EncoderConfig, load_encoder
from actmat.demo.output import DemoFolder
from actmat.demo.run import DemoSettings, load_data
from actmat.demo.tasks import TASKS, Examples, Task, TaskData
from actmat.demo.training import Schedule
from actmat.errors import CheckpointError, RecipeError, did_you_mean

__all__ = ["DemoModels", "batches", "load_demo"]

_BATCH = 100


@dataclass(frozen=True, slots=True)
class DemoModels:
    """What a demo left: checkpoints in `folder`, heads, and the data of every task made again from the seed."""

    folder: DemoFolder
    seed: int
    settings: DemoSettings
    heads: Mapping[str, Head]
    data: Mapping[str, TaskData]
    merged: tuple[str, ...]

    def base(self) -> Encoder:
        """The base, to be trained or read."""
        return load_encoder(self.folder.base)

    def expert(self, task: str) -> Encoder:
        """The expert of a task."""
        return load_encoder(self.folder.expert(self.task(task).name))

    def task(self, name: str) -> Task:
        """A task of the demo.

        Raises:
            RecipeError: there is none of that name.
        """
        found = {t.name: t for t in TASKS}
        if name not in found:
            raise RecipeError(f"The demo has no task '{name}'.{did_you_mean(name, found)} It has {', '.join(found)}.")
        return found[name]

    def loss(self, encoder: Encoder, task: str, examples: Examples) -> Tensor:
        """Cross-entropy behind the task's frozen head, mean over the examples."""
        return nn.functional.cross_entropy(self.heads[task](encoder(examples.images_NHW)), examples.labels_N)


def load_demo(folder: Path) -> DemoModels:
    """Open what `actmat demo` has written.

    Raises:
        CheckpointError: no finished demo is there.
        MergeError: scikit-learn is missing.
    """
    place = DemoFolder(Path(folder))
    if not place.results.is_file():
        raise CheckpointError(
            f"{folder} holds no finished demo (no results.json). Make one: actmat demo --out {folder}"
        )
    stored = json.loads(place.results.read_text(encoding="utf-8"))
    given = dict(stored["settings"])
    settings = DemoSettings(
        **{
            **given,
            "encoder": EncoderConfig(**given["encoder"]),
            "pretraining": Schedule(**given["pretraining"]),
            "finetuning": Schedule(**given["finetuning"]),
        }
    )
    seed = int(stored["seed"])
    return DemoModels(
        folder=place,
        seed=seed,
        settings=settings,
        heads=load_heads(place.heads),
        data=load_data(settings, seed)[1],
        merged=tuple(row["name"] for row in stored["rows"] if row["kind"] == "merged"),
    )


def batches(examples: Examples, size: int = _BATCH) -> Iterator[Examples]:
    """The examples in their order, the last batch smaller."""
    for index_N in torch.split(torch.arange(len(examples)), size):
        yield Examples(examples.images_NHW[index_N], examples.labels_N[index_N])
