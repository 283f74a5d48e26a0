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
from safetensors.torch import load_file
from torch import Tensor, nn

from actmat.errors import CheckpointError, RecipeError, did_you_mean
from actmat.extras.demo.model import Encoder, EncoderConfig, Head, load_encoder
from actmat.extras.demo.tasks import TASKS, Examples, Split, generator_for
from actmat.extras.demo.training import DemoSchedule, DemoSettings, load_data
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

    folder: Path
    seed: int
    settings: DemoSettings
    heads: Mapping[str, Head]
    data: Mapping[str, Split]
    merged: tuple[str, ...]

    @property
    def base(self) -> Path:
        """Checkpoint of the base."""
        return self.folder / "base"

    @property
    def experts(self) -> dict[str, Path]:
        """Task -> checkpoint of its expert."""
        return {name: self.folder / "experts" / name for name in self.data}

    def merge(self, method: str) -> Path:
        """Checkpoint that the demo merged by a method.

        Raises:
            RecipeError: not found.
        """
        if method not in self.merged:
            raise RecipeError(f"The demo has no merge by '{method}'.{did_you_mean(method, self.merged)}")
        return self.folder / "merged" / method

    def task(self, name: str) -> Split:
        """Data of a task of the demo.

        Raises:
            RecipeError: the name is unknown.
        """
        if name not in self.data:
            near = did_you_mean(name, self.data)
            raise RecipeError(f"The demo has no task '{name}'.{near} It has {', '.join(self.data)}.")
        return self.data[name]

    def loss(self, encoder: Encoder, task: str, examples: Examples) -> Tensor:
        """Cross-entropy behind the task's frozen head, mean over the examples."""
        return nn.functional.cross_entropy(self.heads[task](encoder(examples.images_NHW)), examples.labels_N)


def load_demo(folder: Path) -> DemoModels:
    """Open what `actmat demo` has written.

    Raises:
        CheckpointError: no finished demo is there.
        MergeError: scikit-learn is missing.
    """
    results = Path(folder) / "results.json"
    if not results.is_file():
        raise CheckpointError(
            f"{folder} holds no finished demo (no results.json). Make one: actmat demo --out {folder}"
        )
    stored = json.loads(results.read_text(encoding="utf-8"))
    given = dict(stored["settings"])
    schedules = {name: DemoSchedule(**given[name]) for name in ("pretraining", "finetuning")}
    settings = DemoSettings(**given | schedules | {"encoder": EncoderConfig(**given["encoder"])})
    tensors = load_file(results.with_name("heads.safetensors"))
    return DemoModels(
        folder=Path(folder),
        seed=int(stored["seed"]),
        settings=settings,
        heads={task.name: Head(*(tensors[f"{task.name}.{part}"] for part in ("weight", "bias"))) for task in TASKS},
        data=load_data(settings, int(stored["seed"])),
        merged=tuple(row["name"] for row in stored["rows"] if row["kind"] == "merged"),
    )


def batches(examples: Examples, size: int = _BATCH) -> Iterator[Examples]:
    """The examples in their order, the last batch smaller."""
    for index_N in torch.split(torch.arange(len(examples)), size):
        yield examples.take(index_N)


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


def demo_grams(models: DemoModels) -> dict[str, dict[str, Tensor]]:
    """Every expert's Gram matrices on the test photographs of its own task."""
    found = {}
    for task, data in models.data.items():
        encoder = load_encoder(models.experts[task])
        found[task] = input_grams(encoder, [partial(encoder, b.images_NHW) for b in batches(data.test)])
    return found


SAMPLE_SIZES = (1, 10, 100)
"""Of the paper's comparison."""


def demo_scale(demo: Path) -> ScaleResult:
    """`scale` on the test photographs of every task."""
    models = load_demo(demo)
    return scale(models.base, models.experts, demo_grams(models))


def demo_cosine(demo: Path, *, sizes: Sequence[int] = SAMPLE_SIZES, n_draws: int = 5) -> CosineResult:
    """`cosine` against the test photographs; the few samples are drawn from the training photographs."""
    models = load_demo(demo)

    def drawn(task: str, size: int) -> list[dict[str, Tensor]]:
        train, encoder = models.data[task].train, load_encoder(models.experts[task])
        if size > len(train):
            raise RecipeError(f"There are {len(train)} training images of '{task}', fewer than {size}.")
        generator = generator_for(models.seed, f"cosine {task} {size}")
        found = []
        for _ in range(n_draws):
            index_N = torch.randperm(len(train), generator=generator)[:size]
            found.append(input_grams(encoder, [partial(encoder, train.images_NHW[index_N])]))
        return found

    return cosine(models.base, models.experts, demo_grams(models), drawn=drawn, sizes=sizes)


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
    others: dict[str, Source] = {n: models.merge(n) for n in methods or models.merged} | dict(merged or {})
    return interference(models.base, models.experts, others, demo_grams(models))


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
    train = models.task(task).train
    n_own = len(train) // models.settings.n_views
    if most > n_own:
        raise RecipeError(f"There are {n_own} training photographs, fewer than {most}.")
    encoder = load_encoder(models.base if at == "base" else models.experts[task])

    def loss(n: int) -> Tensor:
        return models.loss(encoder, task, train.take(torch.arange(n)))

    return encoder, loss
