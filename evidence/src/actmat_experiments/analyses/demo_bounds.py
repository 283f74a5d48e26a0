"""The bound of Theorem 3.3 on the models of a finished demo."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from actmat.extras.demo.model import load_encoder
from actmat_experiments.analyses.demo import DemoModels, load_demo
from actmat_experiments.analyses.transfer import Losses, TransferResult, transfer


def demo_transfer(demo: Path, *, method: str = "actmat") -> TransferResult:
    """`transfer` of one of the demo's merges, on the test photographs of every task.

    Raises:
        RecipeError: the demo has not merged by this method.
    """
    models = load_demo(demo)
    return transfer(
        load_encoder(models.base).eval(),
        _state(models.base),
        {n: _state(path) for n, path in models.experts.items()},
        _state(models.merge(method)),
        {n: _losses(models, n) for n in models.data},
        title=f"demo, merged by {method}",
    )


def _state(folder: Path) -> dict[str, Tensor]:
    return dict(load_encoder(folder).state_dict())


def _losses(models: DemoModels, task: str) -> Losses:
    """Cross-entropy of every test photograph behind the task's head."""
    examples, head = models.data[task].test, models.heads[task]

    def losses(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(head(model(examples.images_NHW)), examples.labels_N, reduction="none")

    return losses
