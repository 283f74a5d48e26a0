"""AdaMerging's training loop: coefficients that make the merged model's predictions certain, without labels.

    c = argmin sum_k mean_x H(p(. | x; W_0 + sum_t c_t D_t)),      x: unlabeled inputs of task k

One coefficient per expert (task-wise), or one per expert and tensor (layer-wise). The model runs with the merged
weights in place of its own (`torch.func.functional_call`), so that the gradient with respect to the coefficients is
autograd's. The result is data for a merge: options of the method, or rules of a recipe, one per tensor.

E. Yang et al., "AdaMerging: adaptive model merging for multi-task learning", ICLR 2024 (init 0.3, Adam 1e-3).

Shapes: `T` experts, `L` tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from actmat.errors import AlignmentError
from actmat_experiments.core import AdamState, adam_step, entropy

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Coefficients:
    """Learned coefficients.

    Args:
        per: one coefficient per expert, or per expert and tensor.
        names: tensors that the coefficients act on.
        values_LT: one row per tensor (all equal for `per="task"`), one column per expert.
        losses: entropy before each step, in nats, summed over tasks.
    """

    per: Literal["task", "tensor"]
    names: tuple[str, ...]
    values_LT: Tensor
    losses: tuple[float, ...]

    def options(self) -> dict[str, Any]:
        """Options of the method `adamerging`, for task-wise coefficients."""
        if self.per != "task":
            raise ValueError("layer-wise coefficients differ between tensors: use rules()")
        return {"coefficients": self.values_LT[0].tolist()}

    def rules(self) -> list[dict[str, Any]]:
        """Rules of a recipe: for every tensor the method with its coefficients."""
        rows = zip(self.names, self.values_LT.tolist(), strict=True)
        return [{"match": _literal(n), "method": "adamerging", "options": {"coefficients": row}} for n, row in rows]


def learn(
    model: nn.Module,
    base: Mapping[str, Tensor],
    experts: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Callable[[], Iterator[Batch]]],
    *,
    per: Literal["task", "tensor"] = "task",
    steps: int = 500,
    lr: float = 1e-3,
    initial: float = 0.3,
    logits: Callable[[int, Any], Tensor] = lambda task, output: output.logits,
) -> Coefficients:
    """Learn the coefficients by entropy minimization.

    Args:
        model: run with the merged weights; its own are not changed. Put it in evaluation mode.
        experts: the experts' weights; parameters that an expert lacks (a head of its own) stay as they are.
        batches: per task, gives an iterator of unlabeled batches (keyword arguments of the model); started again when
            it ends.
        per: "task" or "tensor".
        steps, lr, initial: Adam's steps, its rate, and where coefficients start.
        logits: `(task, output of the model) -> logits`, for heads that are not part of the merge.

    Raises:
        AlignmentError: a parameter of other shapes; all of them are listed.
    """
    names = _names(model, base, experts)
    start = {n: base[n].detach().float() for n in names}
    deltas = {n: torch.stack([e[n].detach().float() - start[n] for e in experts]) for n in names}
    rows = len(names) if per == "tensor" else 1
    values = torch.full((rows * len(experts),), initial, dtype=torch.float64)
    state = AdamState.zeros(values.numel())
    streams = [_endless(b) for b in batches]
    losses = []
    for _ in range(steps):
        chosen = values.clone().requires_grad_(True)
        table_LT = chosen.view(rows, len(experts)).float()
        merged = {
            n: start[n] + torch.tensordot(table_LT[k if per == "tensor" else 0], deltas[n], dims=1)
            for k, n in enumerate(names)
        }
        terms = [
            entropy(logits(task, functional_call(model, merged, kwargs=dict(next(stream)))))
            for task, stream in enumerate(streams)
        ]
        loss = torch.stack(terms).sum()
        (slope,) = torch.autograd.grad(loss, [chosen])
        losses.append(float(loss.detach()))
        values, state = adam_step(values, slope, state, lr=lr)
    return Coefficients(per, tuple(names), values.view(rows, -1).expand(len(names), -1).clone(), tuple(losses))


def _names(model: nn.Module, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Parameters that the base and all experts hold, in the same shapes."""
    parameters = [n for n, p in model.named_parameters() if p.is_floating_point() and n in base]
    problems = [
        f"'{n}' is {tuple(base[n].shape)} in the base and {tuple(e[n].shape)} in expert {t}"
        for t, e in enumerate(experts)
        for n in parameters
        if n in e and e[n].shape != base[n].shape
    ]
    if problems:
        raise AlignmentError("The experts do not fit the base.", problems)
    return [n for n in parameters if all(n in e for e in experts)]


def _endless(batches: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches():
            empty = False
            yield batch
        if empty:
            raise ValueError("a task gives no batches")


def _literal(name: str) -> str:
    """A pattern that matches this name alone."""
    return "re:" + re.escape(name)
