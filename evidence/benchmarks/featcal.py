"""FeatCal (arXiv:2605.13030) with eight inputs of each expert, on the subjects of `benchmarks.few`.

    python -m benchmarks.featcal adapters --base BASE --data FOLDER   # arguments of `benchmarks.few`

Layers are solved in forward order, each on the inputs `X_s` that it has in the merge so far:

    W = [sum_t W_t X_e^T X_s / ||C_t||_F + l (r W_m + (1 - r) W_0)] [sum_t C_t / ||C_t||_F + l I]^-1,   C_t = X_s^T X_s

with `X_e = a X_t + (1 - a) X_s`, `X_t` the inputs in expert `t`, and `W_m` the average; published: l 0.05, r 2, a 0.3.
Biases and norms are averaged, as in the other rows. Rows are appended to the result file of `benchmarks.few`.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.collect.inputs.masks import Scopes
from actmat.extras.collect.inputs.observer import InputObserver
from benchmarks.few import FILE, Digits, Subject, append_row, open_subject, parse

INPUTS, DRAWS = 8, 3
RIDGE, ALPHA, RHO = 0.05, 0.3, 2.0


class Seen(Exception):
    """The last layer that was asked for has been called."""


class Rows(dict[str, Tensor]):
    """Inputs of each layer, a row for each token, of one call after the other; a call ends at the layer `last`."""

    last = ""

    def add(self, layer: Any, given: Any) -> None:
        """Called by `InputObserver`."""
        self[layer.parameter] = torch.cat([*([self[layer.parameter]] if layer.parameter in self else []), given.rows()])
        if layer.parameter == self.last:
            raise Seen


def observe(model: nn.Module, runs: Sequence[Callable[[], Any]], last: str = "") -> Rows:
    """Inputs of layers during some calls."""
    rows, scopes = Rows(), Scopes(model)
    rows.last = last
    sums: Any = rows
    with torch.no_grad(), InputObserver(dict(model.named_parameters()), scopes, sums):
        for run in runs:
            with contextlib.suppress(Seen):
                run()
            scopes.reset()
    scopes.close()
    return rows


def calls(subject: Subject, model: Any, inputs: Any) -> list[Callable[[], Any]]:
    """A call of the model for each input; of images for all. In training, without dropout: else torch hides layers."""
    model.train()
    if isinstance(subject, Digits):
        return [lambda: model(inputs)]
    return [lambda given=given: model(**given) for given in inputs]


def calibrate(subject: Subject, draw: int) -> dict[str, Tensor]:
    """Deltas of the merge."""
    tasks = range(len(subject.tasks))
    inputs = [subject.inputs(t, "own", draw, INPUTS) for t in tasks]
    experts = [observe(e, calls(subject, e, some)) for e, some in zip(subject.experts, inputs, strict=True)]
    average = {n: sum(d) / len(d) for n, d in subject.deltas.items()}
    merge = subject.merged(average)
    parameters, start = dict(merge.named_parameters()), dict(subject.base.named_parameters())
    for first in dict.fromkeys(subject.shares[n] for n in experts[0] if n in subject.deltas):  # in forward order
        merged = [observe(merge, calls(subject, merge, some), first)[first].double() for some in inputs]
        toward = [ALPHA * rows[first].double() + (1 - ALPHA) * x for rows, x in zip(experts, merged, strict=True)]
        sizes = [float((x.T @ x).norm()) for x in merged]
        right_II = RIDGE * torch.eye(merged[0].shape[1], dtype=torch.float64)
        right_II += sum(x.T @ x / size for x, size in zip(merged, sizes, strict=True))
        for name in (n for n in subject.deltas if subject.shares[n] == first):
            base_OI = start[name].detach().double()
            left_OI = RIDGE * (base_OI + RHO * average[name].double())
            for t in tasks:
                expert_OI = base_OI + subject.deltas[name][t].double()
                left_OI += expert_OI @ (toward[t].T @ merged[t]) / sizes[t]
            parameters[name].data.copy_(torch.linalg.solve(right_II, left_OI, left=False))
    return {n: (parameters[n] - start[n]).detach() for n in subject.deltas}


def main() -> None:
    """Measure all draws of one subject."""
    given = parse(__doc__, "featcal")
    subject = open_subject(given)
    for draw in range(DRAWS if given.subject == "digits" else 1):
        accuracy, kept = subject.score(calibrate(subject, draw))
        row = {"subject": given.subject, "kind": "featcal", "n": INPUTS, "draw": draw, "prior": 0.0, "ridge": RIDGE}
        append_row(FILE, row | {"accuracy": accuracy, "kept": kept, "tasks": list(subject.tasks)})


if __name__ == "__main__":
    main()
