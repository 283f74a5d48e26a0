"""AdaMerging on the inputs by which a merge is chosen, for comparison: a row of `results/pretrained-adamerging.jsonl`.

    python -m benchmarks.pretrained.adamerging text-minilm/full/0 --data DATA --cache CACHE

Coefficients per expert and tensor, fewer and larger steps than the authors' 500 at 1e-3.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat_experiments.adamerging import learn
from actmat_experiments.datafree.matrices import matrices
from benchmarks.common import WORK
from benchmarks.pretrained.subjects import Inputs, Subject, open_subject
from benchmarks.pretrained.tables import ADAMERGING
from benchmarks.provenance import record

__all__ = ["trained"]

STEPS, RATE, BATCH = 150, 1e-2, 8


class Pooled(nn.Module):
    """A model of a subject that gives features."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self._pool = subject.pool

    def forward(self, **arguments: Tensor) -> Tensor:
        return self._pool(self.model, arguments)


def trained(subject: Subject, *, steps: int = STEPS, batch: int = BATCH) -> dict[str, Any]:
    """Test accuracy by task of the trained merge, and the entropy per task before the first and the last step."""
    began = time.process_time()
    subject.write_base()
    states = [{f"model.{n}": t for n, t in _weights(subject, task).items()} for task in subject.tasks]
    names = dict.fromkeys(n for s in states for n in s)
    base = {f"model.{n}": t for n, t in subject.base.items()}
    states = [{n: s.get(n, base[n]) for n in names} for s in states]
    found = learn(
        Pooled(subject),
        base,
        states,
        [_stream(subject.measured[t], batch) for t in subject.tasks],
        per="tensor",
        steps=steps,
        lr=RATE,
        logits=lambda number, features: subject.heads[subject.tasks[number]](features),
    )
    merged = {
        n.removeprefix("model."): base[n] + sum(float(c) * (s[n] - base[n]) for c, s in zip(row, states, strict=True))
        for n, row in zip(found.names, found.values_LT, strict=True)
    }
    subject.model.load_state_dict({**subject.model.state_dict(), **merged})
    test = {}
    for task in subject.tasks:
        inputs = subject.test[task]
        right_N = subject.heads[task](subject.features(inputs)).argmax(-1) == inputs.labels_N
        test[task] = round(float(right_N.double().mean()), 5)
    entropy = [round(found.losses[n] / len(states), 4) for n in (0, -1)]
    head = {"subject": subject.name, "steps": steps, "rate": RATE, "batch": batch, "entropy": entropy, "test": test}
    return head | {"cpu_seconds": round(time.process_time() - began, 1)}


def _weights(subject: Subject, task: str) -> dict[str, Tensor]:
    """Weights of an expert that some rule acts on, or that it changed."""
    found = {n: subject.base[n].clone() for n, _ in subject.keys}
    for key, block in matrices(found, {n: subject.maps[n] for n in found}).items():
        block += subject.deltas[task][key]
    return {**found, **subject.rest[task]}


def _stream(inputs: Inputs, size: int) -> Callable[[], Iterator[Mapping[str, Tensor]]]:
    def batches() -> Iterator[Mapping[str, Tensor]]:
        for _, arguments in inputs.batches:
            length = len(next(iter(arguments.values())))
            for start in range(0, length, size):
                yield {k: v[start : start + size] for k, v in arguments.items()}

    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="+", help="suite/regime/seed")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cache", type=Path, default=WORK / "pretrained-cache")
    parser.add_argument("--file", type=Path, default=ADAMERGING, help="where lines are added")
    parser.add_argument("--inputs", type=int, default=32, help="per task, to train on")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.subjects:
        row = trained(open_subject(name, given.cache, given.data, most=given.inputs), steps=given.steps)
        with given.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        record(given.file, "python -m benchmarks.pretrained.adamerging SUBJECT --data DATA --cache CACHE")
        print(row, flush=True)


if __name__ == "__main__":
    main()
