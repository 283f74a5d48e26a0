"""The models and data of a finished `actmat demo`, and the analyses of checkpoints on them.

Shapes: `N` images or tokens, `H = W` pixels, `I` in_features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from actmat.errors import CheckpointError, RecipeError, did_you_mean
from actmat.extras.demo.heads import Head, load_heads
from actmat.extras.demo.merging import DemoFolder
from actmat.extras.demo.model import Encoder, EncoderConfig, load_encoder
from actmat.extras.demo.run import DemoSettings, load_data
from actmat.extras.demo.tasks import TASKS, Examples, Task, TaskData
from actmat.extras.demo.training import Schedule, generator_for
from actmat_experiments.analyses.correlation import CorrelationResult, correlation
from actmat_experiments.analyses.distribution import DistributionResult, distribution
from actmat_experiments.analyses.estimates import CosineResult, ScaleResult, cosine, scale
from actmat_experiments.analyses.interference import InterferenceResult, interference
from actmat_experiments.analyses.matrices import Source
from actmat_experiments.analyses.monitor import token_rows
from actmat_experiments.analyses.taps import Tap, find_taps, reading

_BATCH = 100


@dataclass(frozen=True, slots=True)
class DemoModels:
    """A finished demo: checkpoints in `folder`, heads, and the data of every task made again from the seed."""

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


def input_grams(model: nn.Module, passes: Iterable[Callable[[], object]]) -> dict[str, Tensor]:
    """`E[z z^T]` over all tokens of some forward passes, by name of the linear map, float64.

    Packed projections (q, k, v) share one tensor. Layers that no pass reaches are left out.

    Args:
        passes: each runs the model on one batch, without padding.
    """
    taps, _ = find_taps(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(tap: Tap, z: Tensor, _: Tensor) -> None:
        rows_NI = token_rows(z, None, tap).double()
        name = tap.weight_name
        sums[name] = sums[name].addmm_(rows_NI.mT, rows_NI) if name in sums else rows_NI.mT @ rows_NI
        counts[name] = counts.get(name, 0) + len(rows_NI)

    with torch.no_grad(), reading(taps, add):
        for run in passes:
            run()
    means = {name: total / counts[name] for name, total in sums.items()}
    return {layer.name: means[t.weight_name] for t in taps if t.weight_name in means for layer in t.maps}


def demo_grams(models: DemoModels, examples: dict[str, Examples] | None = None) -> dict[str, dict[str, Tensor]]:
    """Every expert's Gram matrices on its own task.

    Args:
        examples: task -> what to measure on; default: the test part.
    """
    chosen = examples or {name: data.test for name, data in models.data.items()}
    found = {}
    for task, given in chosen.items():
        encoder = models.expert(task)
        found[task] = input_grams(encoder, [partial(encoder, b.images_NHW) for b in batches(given)])
    return found


SAMPLE_SIZES = (1, 10, 100)
"""Of the paper's comparison."""


def demo_scale(demo: Path) -> ScaleResult:
    """`scale` on the test photographs of every task."""
    models = load_demo(demo)
    return scale(models.folder.base, {n: models.folder.expert(n) for n in models.data}, demo_grams(models))


def demo_cosine(demo: Path, *, sizes: Sequence[int] = SAMPLE_SIZES, n_draws: int = 5) -> CosineResult:
    """`cosine` against the test photographs; the few samples are drawn from the training photographs."""
    models = load_demo(demo)

    def drawn(task: str, size: int) -> list[dict[str, Tensor]]:
        train, encoder = models.data[task].train, models.expert(task)
        if size > len(train):
            raise RecipeError(f"There are {len(train)} training images of '{task}', fewer than {size}.")
        generator = generator_for(models.seed, f"cosine {task} {size}")
        found = []
        for _ in range(n_draws):
            index_N = torch.randperm(len(train), generator=generator)[:size]
            found.append(input_grams(encoder, [partial(encoder, train.images_NHW[index_N])]))
        return found

    experts = {n: models.folder.expert(n) for n in models.data}
    return cosine(models.folder.base, experts, demo_grams(models), drawn=drawn, sizes=sizes)


def demo_interference(
    demo: Path, *, methods: Sequence[str] | None = None, merged: Mapping[str, Source] | None = None
) -> InterferenceResult:
    """`interference` on the test photographs.

    Args:
        merged: name -> further merges of the demo's experts.

    Raises:
        RecipeError: the demo has not merged by one of these methods.
    """
    models = load_demo(demo)
    for name in methods or ():
        if name not in models.merged:
            raise RecipeError(f"The demo has no merge by '{name}'.{did_you_mean(name, models.merged)}")
    chosen = methods or models.merged
    experts = {n: models.folder.expert(n) for n in models.data}
    others: dict[str, Source] = {n: models.folder.merged(n) for n in chosen} | dict(merged or {})
    return interference(models.folder.base, experts, others, demo_grams(models))


def demo_correlation(
    demo: Path,
    *,
    task: str = "digit",
    at: str = "base",
    sizes: Sequence[int] = (16, 64, 256, 900),
    n_permutations: int = 20,
    layers: Sequence[str] | None = None,
    on_size: Callable[[], object] = lambda: None,
) -> CorrelationResult:
    """`correlation` on training photographs (not their moved copies), at the start or the end of fine-tuning.

    Raises:
        RecipeError: an unknown task, or more photographs than there are.
    """
    models = load_demo(demo)
    encoder, loss = _photographs(models, task, at, max(sizes, default=0))
    title = f"demo, '{task}', at the {at}"
    return correlation(
        encoder,
        loss,
        sizes,
        layers=layers,
        n_permutations=n_permutations,
        seed=models.seed,
        title=title,
        on_size=on_size,
    )


def demo_distribution(
    demo: Path,
    *,
    task: str = "digit",
    at: str = "base",
    n_samples: int = 100,
    n_permutations: int = 5,
    layers: Sequence[str] | None = None,
) -> DistributionResult:
    """`distribution` on the same photographs.

    Raises:
        RecipeError: an unknown task, or more photographs than there are.
    """
    models = load_demo(demo)
    encoder, loss = _photographs(models, task, at, n_samples)
    return distribution(
        encoder,
        partial(loss, n_samples),
        n_samples,
        layers=layers,
        n_permutations=n_permutations,
        seed=models.seed,
        title=f"demo, '{task}', at the {at}",
    )


def _photographs(models: DemoModels, task: str, at: str, most: int) -> tuple[Encoder, Callable[[int], Tensor]]:
    """The model, and its loss on the first training photographs."""
    train = models.data[models.task(task).name].train
    n_own = len(train) // models.settings.n_views
    if most > n_own:
        raise RecipeError(f"There are {n_own} training photographs, fewer than {most}.")
    encoder = models.base() if at == "base" else models.expert(task)

    def loss(n: int) -> Tensor:
        return models.loss(encoder, task, Examples(train.images_NHW[:n], train.labels_N[:n]))

    return encoder, loss
