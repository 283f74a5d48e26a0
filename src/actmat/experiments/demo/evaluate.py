"""How many answers are right, and how sure that is.

Shapes: `N` photographs, `T` tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.experiments.demo.heads import Head
from actmat.experiments.demo.model import Encoder
from actmat.experiments.demo.tasks import Examples

__all__ = ["Interval", "correct", "features", "majority_correct", "mean_interval", "wilson_interval"]

_BATCH = 100
_Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share between 0 and 1 and its 95 % interval."""

    value: float
    low: float
    high: float


@torch.no_grad()
def features(encoder: Encoder, images_NHW: Tensor) -> Tensor:
    """`N H W -> N D`, without gradients, in batches that fit a cache."""
    return torch.cat([encoder(batch) for batch in torch.split(images_NHW, _BATCH)])


def correct(encoder: Encoder, head: Head, examples: Examples) -> Tensor:
    """Which examples are answered rightly: bool `N`."""
    return head(features(encoder, examples.images_NHW)).argmax(1) == examples.labels_N


def majority_correct(train: Examples, test: Examples, n_classes: int) -> Tensor:
    """The same for a model that always gives the most frequent answer of the training examples: bool `N`."""
    return test.labels_N == torch.bincount(train.labels_N, minlength=n_classes).argmax()


def wilson_interval(n_right: int, n: int) -> Interval:
    """95 % interval of a share: `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    Unlike the textbook's `p +- z sqrt(p(1-p)/n)` it stays within 0..1 and holds near the ends.
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    share, z2 = n_right / n, _Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(correct_TN: Tensor) -> Interval:
    """Mean over tasks, `m +- z s / sqrt(N)` with `s` the standard deviation, over photographs, of their mean scores.

    All tasks are tested on the same photographs, so a photograph, not an answer, is what was drawn at random.
    """
    score_N = correct_TN.double().mean(0)
    half = _Z_95 * float(score_N.std()) / math.sqrt(len(score_N))
    mean = float(score_N.mean())
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))
