"""The run behind `theorem2`: a small network fine-tuned on several tasks of the demo, merged by ACTMat.

Shapes: `N` images, `F` outputs of the network, `C` classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from actmat.errors import RecipeError
from actmat_experiments.analyses.mlp import MLP, ActivationName, new_mlp
from actmat_experiments.analyses.theorem2 import Sample, Theorem2Result, transfer_bound

__all__ = ["merge_mlps", "theorem2"]

_PIXELS, _OUTPUTS = 64, 16
_RATE, _BATCH = 2e-3, 64


def theorem2(
    *,
    n_tasks: int = 3,
    width: int = 32,
    activation: ActivationName = "relu",
    pretraining_steps: int = 300,
    finetuning_steps: int = 200,
    method: str = "actmat",
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> Theorem2Result:
    """Train a base and experts (float64, `64 -> width -> width -> 16`), merge them, and compute both sides.

    Every task reads its logits off the 16 outputs through a frozen head with orthonormal rows, so that the loss has the
    Lipschitz constant `sqrt(2)` of cross-entropy. Expectations are means over the task's test photographs.

    Args:
        n_tasks: 2 to 6 tasks of the demo.
        pretraining_steps: AdamW steps of the base, digits in all looks.
        finetuning_steps: AdamW steps of every expert.
        method: rule that merges the weight matrices; biases are averaged.

    Raises:
        RecipeError: fewer than two tasks, or more than the demo has.
        NumericalError: an inequality does not hold.
        MergeError: scikit-learn is missing.
    """
    from actmat.demo.data import load_photographs, split_photographs
    from actmat.demo.tasks import TASKS, pose_split
    from actmat.demo.training import generator_for

    if not 2 <= n_tasks <= len(TASKS):
        raise RecipeError(f"theorem2 merges 2 to {len(TASKS)} tasks; got {n_tasks}.")
    split = split_photographs(load_photographs(), n_validation=1, n_test=600, generator=generator_for(seed, "split"))
    tasks = TASKS[:n_tasks]
    data = {t.name: pose_split(t, split, n_views=1, seed=seed) for t in tasks}
    generator = generator_for(seed, "theorem2")
    heads = {t.name: _orthonormal(t.n_classes, generator) for t in tasks}
    base = new_mlp((_PIXELS, width, width, _OUTPUTS), activation=activation, seed=seed)

    def train(model: MLP, names: list[str], n_steps: int) -> MLP:
        optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
        for step in range(n_steps):
            name = names[step % len(names)]
            examples = data[name].train
            index_N = torch.randint(len(examples), (_BATCH,), generator=generator)
            loss = _losses(heads[name], examples.labels_N[index_N])(model(examples.images_NHW[index_N].double())).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            on_step()
        return model

    train(base, list(data), pretraining_steps)
    experts = [train(copy.deepcopy(base), [name], finetuning_steps) for name in data]
    samples = {
        name: Sample(d.test.images_NHW.double(), _losses(heads[name], d.test.labels_N), math.sqrt(2))
        for name, d in data.items()
    }
    settings = {
        "tasks": list(data),
        "widths": [_PIXELS, width, width, _OUTPUTS],
        "activation": activation,
        "pretraining_steps": pretraining_steps,
        "finetuning_steps": finetuning_steps,
        "method": method,
        "seed": seed,
    }
    result = transfer_bound(base, experts, merge_mlps(base, experts, method), samples, settings)
    result.check()
    return result


@torch.no_grad()
def merge_mlps(base: MLP, experts: list[MLP], method: str) -> MLP:
    """Weight matrices by the rule, biases by the mean."""
    from actmat.matrices import merge_matrices

    merged = copy.deepcopy(base)
    for index, layer in enumerate(merged.layers):
        own = [expert.layers[index] for expert in experts]
        deltas = [o.weight - layer.weight for o in own]
        layer.weight += merge_matrices(method, deltas)
        layer.bias.copy_(torch.stack([o.bias for o in own]).mean(0))
    return merged


def _orthonormal(n_classes: int, generator: torch.Generator) -> Tensor:
    """`C F` with orthonormal rows."""
    square_FF = torch.randn(_OUTPUTS, _OUTPUTS, generator=generator, dtype=torch.float64)
    basis_FF: Tensor = torch.linalg.qr(square_FF).Q
    return basis_FF[:n_classes]


def _losses(head_CF: Tensor, labels_N: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross-entropy of every sample; its gradient in the logits, `p - e_y`, is no longer than `sqrt(2)`."""

    def losses(outputs_NF: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs_NF @ head_CF.mT, labels_N, reduction="none")

    return losses
