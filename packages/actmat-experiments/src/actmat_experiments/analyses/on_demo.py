"""The analyses of checkpoints, on what `actmat demo` has left: the inputs they need, put together.

Shapes: `N` images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actmat.demo.tasks import Examples
from actmat.demo.training import generator_for
from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.analyses.correlation import CorrelationResult, correlation
from actmat_experiments.analyses.cosine import CosineResult, cosine
from actmat_experiments.analyses.demo_models import load_demo
from actmat_experiments.analyses.grams import demo_grams, input_grams
from actmat_experiments.analyses.interference import InterferenceResult, interference
from actmat_experiments.analyses.matrices import Source
from actmat_experiments.analyses.scale import ScaleResult, scale

__all__ = ["demo_correlation", "demo_cosine", "demo_interference", "demo_scale"]

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
            found.append(input_grams(encoder, [lambda i=index_N: encoder(train.images_NHW[i])]))  # type: ignore[misc]
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
    train = models.data[models.task(task).name].train
    n_own = len(train) // models.settings.n_views
    if sizes and max(sizes) > n_own:
        raise RecipeError(f"There are {n_own} training photographs, fewer than {max(sizes)}.")
    encoder = models.base() if at == "base" else models.expert(task)

    def loss(n: int) -> Tensor:
        return models.loss(encoder, task, Examples(train.images_NHW[:n], train.labels_N[:n]))

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
