"""One subject: every rule and length, every method at every scale, on test data, on unlabelled inputs and on noise.

Shapes: `N` inputs, `C` classes.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.datafree.lengths import LENGTHS, inner
from benchmarks.pretrained.merges import CHOICES, Merge, aligned, by_method, estimate, rules
from benchmarks.pretrained.subjects import Inputs, Subject

SCALES = (0.5, 1.0, 2.0)
LENGTHENED = ("average", "tsv")
"""Rules whose length is varied; the others have length one."""
TOO_LONG = ("tsv", "actmat", "actmat_ridge", "aswudi")
"""Methods that are not tried at twice their length on adapters, whose merges they make too long as they are."""
BY_INPUTS = (*CHOICES, "inputs, regmean", "inputs, regmean by half")
"""Candidates of a choice by inputs; those without data at every scale."""
NUMBERS = (8, 16, 32, 64, 128)
DRAWS = 40
"""Draws of so many inputs, of each of which the choice is kept."""


@dataclass(frozen=True)
class Asked:
    """Inputs, and what the experts say to them: log-probabilities, `N C`, by task."""

    inputs: Mapping[str, Inputs]
    said: Mapping[str, Tensor]


def measure(subject: Subject, folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """All that the tables need, as plain data.

    Args:
        quick: only methods without data, at every scale and length, on test data and on noise.
        folder: for second moments, which are removed in the end.
    """
    began = time.process_time()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    known = estimate(subject, folder, quick=quick)
    asked, own = _asked(subject, quick=quick)
    subject.write_base()
    base = {t: _right(subject, t)["share"] for t in subject.tasks}
    rows: list[dict[str, Any]] = []
    losses: dict[int, dict[str, Tensor]] = {}
    for name, merged in rules(subject, known):
        for length, scale in _lengths(subject, name, merged, quick):
            same = next((r for r in rows if (r["rule"], r["scale"]) == (name, scale)), None)
            if same is None:
                subject.write(merged, scale)
                choosing = not quick and name in BY_INPUTS and length in ("one", "fixed")
                same, found = _scored(subject, asked, choosing=choosing)
                if choosing:
                    losses[len(rows)] = found
            rows.append({**same, "rule": name, "length": length, "scale": scale})
        print(f"  {subject.name}: {name}, {time.process_time() - began:.0f} s", flush=True)
    found_row = {
        "subject": subject.name,
        "suite": subject.suite,
        "regime": subject.regime,
        "seed": subject.seed,
        "tasks": subject.tasks,
        "inputs": {t: [len(subject.measured[t]), len(subject.held[t])] for t in subject.tasks},
        "own": own,
        "base": base,
        "alignment": {} if quick else aligned(subject, known),
        "draws": _draws(losses, subject.seed) if losses else {},
        "rows": rows,
    }
    shutil.rmtree(folder, ignore_errors=True)
    return found_row | {"cpu_seconds": round(time.process_time() - began, 1)}


def measure_methods(subject: Subject, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of methods without data at length one, on test data and on noise, for a subject that was measured before."""
    asked, _ = _asked(subject, quick=True)
    rows = []
    for method in methods:
        subject.write(by_method(subject, method))
        rows.append({**_scored(subject, asked, choosing=False)[0], "rule": method, "length": "one", "scale": 1.0})
    return rows


def _lengths(subject: Subject, name: str, merged: Merge, quick: bool) -> Iterator[tuple[str, float]]:
    yield "one", 1.0
    if name in CHOICES:
        most = 1.0 if subject.factors and name in TOO_LONG else max(SCALES)
        some = SCALES if name in LENGTHENED or not quick else ()
        yield from (("fixed", scale) for scale in some if scale != 1 and scale <= most)
    if name in LENGTHENED:
        sums = inner(merged, list(subject.deltas.values()))
        yield from ((length, round(rule(sums), 4)) for length, rule in LENGTHS.items() if length != "one")


def _log_p(subject: Subject, task: str, features: Tensor) -> Tensor:
    logits: Tensor = subject.heads[task](features).double()
    return logits.log_softmax(-1)


def _asked(subject: Subject, *, quick: bool) -> tuple[dict[str, Asked], dict[str, float]]:
    """Kind of inputs -> what each expert says; and the experts' own test accuracy."""
    kinds = {
        "measured": subject.measured,
        "held": subject.held,
        "other": {t: subject.held[s] for t, s in _next(subject.tasks).items()},
        "noise": dict.fromkeys(subject.tasks, subject.noise),
    }
    kinds = {kind: inputs for kind, inputs in kinds.items() if kind == "noise" or not quick}
    said: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    own = {}
    for task in subject.tasks:
        subject.write_expert(task)
        own[task] = _right(subject, task)["share"]
        for kind, inputs in kinds.items():
            said[kind][task] = _log_p(subject, task, subject.features(inputs[task]))
    return {kind: Asked(inputs, said[kind]) for kind, inputs in kinds.items()}, own


def _next(tasks: Sequence[str]) -> dict[str, str]:
    """Task -> another task."""
    return {task: tasks[(n + 1) % len(tasks)] for n, task in enumerate(tasks)}


def _right(subject: Subject, task: str) -> dict[str, Any]:
    """Share of right answers on the test part, and on its even positions."""
    inputs = subject.test[task]
    right_N = subject.heads[task](subject.features(inputs)).argmax(-1) == inputs.labels_N
    return {"share": round(float(right_N.double().mean()), 5), "even": round(float(right_N[::2].double().mean()), 5)}


def _scored(
    subject: Subject, asked: Mapping[str, Asked], *, choosing: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A row's numbers, and divergences by input: `held` and `measured` inputs of every task.

    Args:
        choosing: score on inputs of tasks too.
    """
    tests = {t: _right(subject, t) for t in subject.tasks}
    row: dict[str, Any] = {
        "test": {t: found["share"] for t, found in tests.items()},
        "even": {t: found["even"] for t, found in tests.items()},
    }
    features = subject.features(subject.noise)
    noise = {t: _divergence(asked["noise"].said[t], _log_p(subject, t, features)) for t in subject.tasks}
    row["noise"] = _mean(noise)
    if not choosing:
        return row, {}
    found: dict[str, dict[str, Tensor]] = {"measured": {}, "held": {}, "other": {}}
    right: dict[str, float] = {}
    other = {s: t for t, s in _next(subject.tasks).items()}
    for task in subject.tasks:
        for kind in ("measured", "held"):
            inputs = asked[kind].inputs[task]
            features = subject.features(inputs)
            said = _log_p(subject, task, features)
            found[kind][task] = _divergence(asked[kind].said[task], said)
            if kind == "held":
                right[task] = float((said.argmax(-1) == inputs.labels_N).double().mean())
                found["other"][other[task]] = _divergence(
                    asked["other"].said[other[task]], _log_p(subject, other[task], features)
                )
    row |= {kind: _mean(values) for kind, values in found.items()}
    row["second half measured"] = _mean({t: v[len(v) // 2 :] for t, v in found["measured"].items()})
    row["labels"] = round(sum(right.values()) / len(right), 5)
    return row, {t: torch.cat([found["held"][t], found["measured"][t]]) for t in subject.tasks}


def _divergence(expert_NC: Tensor, merged_NC: Tensor) -> Tensor:
    """`N`: `KL(expert || merged)`, in nats."""
    return (expert_NC.exp() * (expert_NC - merged_NC)).sum(-1)


def _mean(by_task: Mapping[str, Tensor]) -> float:
    return round(float(torch.stack([v.mean() for v in by_task.values()]).mean()), 6)


def _draws(losses: Mapping[int, Mapping[str, Tensor]], seed: int) -> dict[str, list[int]]:
    """Number of inputs -> row that each draw of so many held inputs chooses; all inputs where these are too few."""
    chosen: dict[str, list[int]] = {}
    rng = random.Random(seed)
    sizes = {t: len(v) for t, v in next(iter(losses.values())).items()}
    for number in NUMBERS:
        if number > max(sizes.values()):
            break
        picks = []
        for _ in range(DRAWS):
            drawn = {}
            for t, size in sizes.items():
                usable = size // 2 if number <= max(sizes.values()) // 2 else size
                drawn[t] = torch.tensor(rng.sample(range(usable), min(number, usable)))
            means = {
                row: float(torch.stack([v[drawn[t]].mean() for t, v in by_task.items()]).mean())
                for row, by_task in losses.items()
            }
            picks.append(min(means, key=lambda row: means[row]))
        chosen[str(number)] = picks
    return chosen
