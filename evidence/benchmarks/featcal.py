"""FeatCal (arXiv:2605.13030) with eight inputs of each expert, on the subjects of `benchmarks.few`.

    python -m benchmarks.featcal adapters --base BASE --data FOLDER   # arguments of `benchmarks.few`

Layers are solved in forward order, each on the inputs `X_s` that it has in the merge so far:

    W = [sum_t W_t X_e^T X_s / ||C_t||_F + l (r W_m + (1 - r) W_0)] [sum_t C_t / ||C_t||_F + l I]^-1,   C_t = X_s^T X_s

with `X_e = a X_t + (1 - a) X_s`, `X_t` the inputs in expert `t`, and `W_m` the average; published: l 0.05, r 2, a 0.3.
Biases and norms are averaged, as in the other rows. Rows are appended to the result file of `benchmarks.few`.

Shapes: `O` out_features, `I` in_features, `N` samples or tokens.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.collect.inputs.masks import Scopes
from actmat.extras.collect.inputs.observer import InputObserver
from benchmarks.few import FILE, Digits, Subject, open_subject, parse
from benchmarks.provenance import processor

INPUTS, DRAWS = 8, 3
RIDGE, ALPHA, RHOS = 0.05, 0.3, (2.0, 1.0)


class Rows(dict[str, Tensor]):
    """Inputs `N I` of each layer, one call after the other."""

    def add(self, layer: Any, given: Any) -> None:
        """Called by `InputObserver`."""
        before = [self[layer.parameter]] if layer.parameter in self else []
        self[layer.parameter] = torch.cat([*before, given.rows()])


@torch.no_grad()
def observe(model: nn.Module, call: Callable[[], Any]) -> Rows:
    """Inputs of all layers during a call."""
    rows, scopes = Rows(), Scopes(model)
    sums: Any = rows
    with InputObserver(dict(model.named_parameters()), scopes, sums):
        call()
    scopes.close()
    return rows


def runs(subject: Subject, model: Any, inputs: Any) -> list[Callable[[], Any]]:
    """A call of the model for each input; of images for all."""
    if isinstance(subject, Digits):
        return [lambda: model(inputs)]
    return [lambda given=given: model(**given, use_cache=False) for given in inputs]


class Caught(Exception):
    """The arguments of the first block are there."""


def arguments(block: nn.Module, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Hidden states and other arguments with which a call reaches a block."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0], kwargs))
        raise Caught

    with torch.no_grad(), block.register_forward_pre_hook(catch, with_kwargs=True), contextlib.suppress(Caught):
        call()
    return seen[0]


def calibrate(subject: Subject, draw: int, rho: float) -> dict[str, Tensor]:
    """Deltas of the merge."""
    tasks = range(len(subject.tasks))
    inputs = [subject.inputs(t, "own", draw, INPUTS) for t in tasks]
    model = copy.deepcopy(subject.base)
    parameters, start = dict(model.named_parameters()), dict(subject.base.named_parameters())
    average = {n: sum(d) / len(d) for n, d in subject.deltas.items()}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor += average.get(name, subject._rest.get(name, 0))
    for some in (model, *subject.experts):
        some.train()  # without dropout: the fast path of attention, which is not observed, is for evaluation
    experts = [observe(e, lambda e=e, t=t: [run() for run in runs(subject, e, inputs[t])])
               for t, e in enumerate(subject.experts)]  # fmt: skip

    def solve(layers: Sequence[str], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace layers that read the same input."""
        merged = [some[layers[0]].double() for some in rows]
        towards = [ALPHA * x[layers[0]].double() + (1 - ALPHA) * s for x, s in zip(experts, merged, strict=True)]
        sizes = [float((s.T @ s).norm()) for s in merged]
        right_II = sum(s.T @ s / size for s, size in zip(merged, sizes, strict=True))
        right_II = right_II + RIDGE * torch.eye(len(right_II), dtype=torch.float64)
        for name in layers:
            base_OI = start[name].detach().double()
            left_OI = RIDGE * (base_OI + rho * average[name].double())
            for t in tasks:
                expert_OI = base_OI + subject.deltas[name][t].double()
                left_OI = left_OI + expert_OI @ (towards[t].T @ merged[t]) / sizes[t]
            parameters[name].data.copy_(torch.linalg.solve(right_II, left_OI, left=False))

    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    named = [[n for n, p in parameters.items() if n in subject.deltas and any(p is q for q in b.parameters())]
             for b in blocks]  # fmt: skip
    calls = [runs(subject, model, some) for some in inputs]
    for name in sorted(set(subject.deltas) - {n for some in named for n in some}):  # before the blocks
        solve([name], [observe(model, lambda some=some: [run() for run in some]) for some in calls])
    states = [[arguments(blocks[0], run) for run in some] for some in calls]
    for block, names in zip(blocks, named, strict=True):

        def step(some: Sequence[tuple[Any, dict[str, Any]]], block: nn.Module = block) -> list[Any]:
            outputs = [block(hidden, **more) for hidden, more in some]
            return [out if isinstance(out, Tensor) else out[0] for out in outputs]

        for first in dict.fromkeys(subject.shares[n] for n in names):
            group = [n for n in names if subject.shares[n] == first]
            solve(group, [observe(model, lambda some=some: step(some)) for some in states])
        with torch.no_grad():
            states = [[(out, more) for out, (_, more) in zip(step(s), s, strict=True)] for s in states]
    return {n: (parameters[n] - start[n]).detach() for n in subject.deltas}


def main() -> None:
    """Measure all draws of one subject."""
    given = parse(__doc__, "featcal")
    subject = open_subject(given)
    for rho in RHOS:
        for draw in range(DRAWS if given.subject == "digits" else 1):
            accuracy, kept = subject.score(calibrate(subject, draw, rho))
            row = {"kind": "featcal", "n": INPUTS, "draw": draw, "prior": 0.0, "ridge": RIDGE, "rho": rho}
            row = {"subject": given.subject, **row, "accuracy": accuracy, "kept": kept, "tasks": list(subject.tasks)}
            with FILE.open("a") as file:
                file.write(json.dumps(row | {"processor": processor(), "date": time.strftime("%Y-%m-%d")}) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
