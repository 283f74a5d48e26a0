"""Classification heads: fitted once on the features of the base, by a formula, and frozen; and answers given by them.

Shapes: `N` examples, `H = W` pixels, `D` features, `C` classes.

One head per task is shared by base, expert and merged models, so that only the encoders differ; the vision experiments
of the merging literature build such heads from text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.extras.demo.model import Encoder
from actmat.extras.demo.tasks import Examples

_BATCH = 100


@dataclass(frozen=True, slots=True)
class Head:
    """`logits = z weight^T + bias`. The tensors ask for no gradient and are never written to."""

    weight_CD: Tensor
    bias_C: Tensor

    def __call__(self, features_ND: Tensor) -> Tensor:
        """`N D -> N C`."""
        return torch.nn.functional.linear(features_ND, self.weight_CD, self.bias_C)

    def to(self, device: str) -> Head:
        """The same head elsewhere."""
        return Head(self.weight_CD.to(device), self.bias_C.to(device))


def fit_head(features_ND: Tensor, labels_N: Tensor, n_classes: int, *, ridge: float, scale: float) -> Head:
    """Ridge regression onto the one-hot labels, in closed form and in float64.

    `W = Y^T Z (Z^T Z + ridge * tr(Z^T Z)/D * I)^{-1}` with centred features `Z` and centred one-hot labels `Y`, and
    `b = mean(y) - W mean(z)`; both are multiplied by `scale`, because a regression's outputs between 0 and 1 would be
    far too flat as logits.

    Args:
        ridge: regularisation relative to the mean variance of a feature, above 0.
    """
    features_ND = features_ND.double()
    targets_NC = torch.nn.functional.one_hot(labels_N, n_classes).double()
    mean_D, mean_C = features_ND.mean(0), targets_NC.mean(0)
    centred_ND = features_ND - mean_D
    gram_DD = centred_ND.mT @ centred_ND
    gram_DD.diagonal().add_(ridge * gram_DD.diagonal().mean())
    weight_CD = torch.linalg.solve(gram_DD, centred_ND.mT @ (targets_NC - mean_C)).mT
    bias_C = mean_C - weight_CD @ mean_D
    return Head((scale * weight_CD).float().contiguous(), (scale * bias_C).float())


@torch.no_grad()
def features(encoder: Encoder, images_NHW: Tensor) -> Tensor:
    """`N H W -> N D`, without gradients, in batches that fit a cache."""
    return torch.cat([encoder(batch) for batch in torch.split(images_NHW, _BATCH)])


def correct(encoder: Encoder, head: Head, examples: Examples) -> Tensor:
    """True for the examples that are answered rightly: bool `N`."""
    return head(features(encoder, examples.images_NHW)).argmax(1) == examples.labels_N


def majority_correct(train: Examples, test: Examples, n_classes: int) -> Tensor:
    """The same for a model that always gives the most frequent answer of the training examples: bool `N`."""
    return test.labels_N == torch.bincount(train.labels_N, minlength=n_classes).argmax()


def save_heads(heads: Mapping[str, Head], path: Path) -> None:
    """All heads in one file, `<task>.weight` and `<task>.bias`."""
    tensors = {f"{task}.weight": head.weight_CD for task, head in heads.items()}
    save_file(tensors | {f"{task}.bias": head.bias_C for task, head in heads.items()}, path)


def load_heads(path: Path) -> dict[str, Head]:
    """Read a file of `save_heads`."""
    tensors = load_file(path)
    tasks = sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    return {task: Head(tensors[f"{task}.weight"], tensors[f"{task}.bias"]) for task in tasks}
