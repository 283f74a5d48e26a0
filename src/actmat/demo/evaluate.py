"""Count right answers.

Shapes: `N` photographs, `H = W` pixels, `D` features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.demo.heads import Head
from actmat.demo.model import Encoder
from actmat.demo.tasks import Examples

__all__ = ["correct", "features", "majority_correct"]

_BATCH = 100


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
