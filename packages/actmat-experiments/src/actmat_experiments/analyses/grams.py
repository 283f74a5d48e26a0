"""Gram matrices of the inputs of a model's linear layers.

Shapes: `N` tokens, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from actmat.demo.tasks import Examples
from actmat_experiments.analyses.demo_models import DemoModels, batches
from actmat_experiments.analyses.monitor import token_rows
from actmat_experiments.analyses.taps import Tap, find_taps, reading

__all__ = ["demo_grams", "input_grams"]


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
        found[task] = input_grams(encoder, [lambda b=b, e=encoder: e(b.images_NHW) for b in batches(given)])  # type: ignore[misc]
    return found
