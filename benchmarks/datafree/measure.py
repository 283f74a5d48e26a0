"""One subject: merges by estimates of the layers' inputs that need no data, and lengths of merges, on its test data.

Matrices (linear layers, convolutions, blocks of packed attention) are merged by a rule, all else is the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat import merge_matrices
from actmat_experiments.datafree.grams import (
    alignment,
    delta_gram,
    excess_gram,
    left_out_share,
    merge_by,
    mixed,
    moved_gram,
)
from actmat_experiments.datafree.lengths import LENGTHS, inner
from actmat_experiments.datafree.matrices import Key, assembled, input_grams, linear_maps, matrices
from actmat_experiments.forecast.models import Factors
from benchmarks.tune.subjects import Batch, Subject

__all__ = ["LENGTHENED", "LENGTHS", "METHODS", "SCALES", "measure"]

METHODS = (
    *("average", "task_arithmetic", "tsv", "iso_c", "actmat", "actmat_ridge", "swudi", "aswudi"),
    *("cart", "dc_merge"),
)
"""Rules as they are, by their defaults."""
LENGTHENED = ("average", "tsv", "actmat")
"""Rules whose length is varied."""
SCALES = (0.3, 0.5, 2.0)
INPUTS = 64
"""Inputs per expert of the reference that sees data, and of noise."""

Merge = dict[Key, Tensor]


@dataclass(frozen=True)
class Known:
    """A subject in memory; estimates by expert and matrix."""

    subject: Subject
    model: nn.Module
    base: Mapping[str, Tensor]
    experts: Sequence[Mapping[str, Tensor]]
    maps: Mapping[str, int]
    deltas: Sequence[Mapping[Key, Tensor]]
    estimates: Mapping[str, Sequence[Mapping[Key, Tensor]]]
    prior: Mapping[Key, Tensor]
    noise: Mapping[str, Sequence[tuple[dict[str, Tensor], Tensor]]]

    @property
    def keys(self) -> list[Key]:
        """Matrices, in the order of the model."""
        return list(matrices(self.base, self.maps))


def measure(subject: Subject, *, most: int | None = None) -> dict[str, Any]:
    """Test accuracy by task of every rule and every length, and how near estimates are to what was measured.

    Args:
        most: only so many rules, for a test.
    """
    began = time.process_time()
    known = know(subject)
    merges = dict(list(directions(known))[:most])
    rows = [{"rule": name, "length": "one", "scale": 1.0, **scored(known, merged)} for name, merged in merges.items()]
    for name in LENGTHENED:
        if name in merges:
            rows += lengthened(known, name, merges[name], next(r for r in rows if r["rule"] == name))
    return {
        "subject": subject.name,
        "suite": subject.suite,
        "regime": subject.regime,
        "seed": subject.seed,
        "tasks": list(subject.experts),
        "own": {t: share(subject, plain(subject, str(p)), t) for t, p in subject.experts.items()},
        "base": {t: share(subject, plain(subject, str(subject.base)), t) for t in subject.experts},
        "alignment": aligned(known),
        "rows": rows,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def plain(subject: Subject, place: str) -> nn.Module:
    """The model, an adapter merged into its base."""
    model: Any = subject.load(place).model
    merged: nn.Module = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return merged.eval()


def share(subject: Subject, model: nn.Module, task: str) -> float:
    """Test accuracy on one task."""
    return round(subject.share(model, task, "test"), 5)


def bare(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
    """Batches without labels."""
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]


def know(subject: Subject) -> Known:
    """Read and run everything once."""
    model = plain(subject, str(subject.base))
    base = {n: t.detach().clone() for n, t in model.state_dict().items()}
    maps = linear_maps(model)
    base_OI = matrices(base, maps)
    tasks = list(subject.experts)
    prior = input_grams(model, bare(subject.noise(tasks[0], INPUTS)), maps)
    maps = {name: blocks for name, blocks in maps.items() if (name, 0) in prior}
    base_OI = {key: w for key, w in base_OI.items() if key in prior}
    experts, deltas = [], []
    noise: list[Merge] = []
    answers: dict[str, list[tuple[dict[str, Tensor], Tensor]]] = {}
    seen: list[Merge] = []
    for task in tasks:
        expert = plain(subject, str(subject.experts[task]))
        experts.append({n: t.detach().clone() for n, t in expert.state_dict().items()})
        own = matrices(experts[-1], maps)
        deltas.append({key: (own[key] - w).float() for key, w in base_OI.items()})
        drawn = bare(subject.noise(task, INPUTS))
        noise.append(input_grams(expert, drawn, maps))
        with torch.no_grad():
            answers[task] = [(b, subject.predict[task](expert, b).float().log_softmax(-1)) for b in drawn[:1]]
        seen.append(input_grams(expert, bare(subject.inputs(task, INPUTS)), maps))
    own = [{key: delta_gram(d) for key, d in some.items()} for some in deltas]
    estimates = {"delta": own, "noise": noise, "inputs": seen}
    estimates["weights"] = [{k: delta_gram(base_OI[k] + d[k]) for k in d} for d in deltas]
    factors = [subject.factors(task) for task in tasks]
    if all(factors):
        estimates |= adapters(factors, own)
    return Known(subject, model, base, experts, maps, deltas, estimates, prior, answers)


def adapters(factors: Sequence[Factors], own: Sequence[Mapping[Key, Tensor]]) -> dict[str, list[Merge]]:
    """Estimates that only adapters have; matrices without an adapter keep `D^T D`, which is zero there."""
    kinds: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "movement of A": lambda b, a, start: moved_gram(a, start),
        "movement of A by use": lambda b, a, start: moved_gram(a, start, b),
        "excess of A": lambda b, a, start: excess_gram(a),
    }
    return {
        name: [
            {key: kind(*some[key]) if key in some else k for key, k in grams.items()}
            for some, grams in zip(factors, own, strict=True)
        ]
        for name, kind in kinds.items()
    }


def directions(known: Known) -> Iterator[tuple[str, Merge]]:
    """Rules and their merges at length one."""
    for method in METHODS:
        yield method, {key: by_method(known, method, key) for key in known.keys}
    for name, grams in known.estimates.items():
        for part in (0.5, 0.9):
            yield f"{name}, {part:g}", by_estimate(known, grams, part)
        if name not in ("inputs", "weights"):
            chosen = left_out_share(known.deltas, grams)
            yield f"{name}, left out", by_estimate(known, grams, chosen)
    own = known.estimates["delta"]
    yield "delta over base's inputs, 0.5", by_estimate(known, own, 0.5, known.prior)


def by_method(known: Known, method: str, key: Key) -> Tensor:
    """The merged delta of one matrix."""
    return merge_matrices(method, [d[key].contiguous() for d in known.deltas])


def by_estimate(
    known: Known, grams: Sequence[Mapping[Key, Tensor]], part: float, prior: Mapping[Key, Tensor] | None = None
) -> Merge:
    """The merge by estimates, mixed with the identity or a prior."""
    return {
        key: merge_by(
            [d[key] for d in known.deltas],
            [mixed(g[key], part, mixed(prior[key], 0.99) if prior else None) for g in grams],
        )
        for key in known.keys
    }


def scored(known: Known, merged_OI: Mapping[Key, Tensor], scale: float = 1.0) -> dict[str, Any]:
    """Test accuracy by task, and divergence from the experts on noise."""
    scaled = {key: scale * m for key, m in merged_OI.items()}
    known.model.load_state_dict(assembled(known.base, known.experts, scaled, known.maps))
    test = {t: share(known.subject, known.model, t) for t in known.subject.experts}
    return {"test": test, "noise": round(on_noise(known), 6)}


def on_noise(known: Known) -> float:
    """`KL(expert || merged)` on noise, in nats, mean over predictions and experts."""
    found = []
    for task, kept in known.noise.items():
        for batch, expert in kept:
            with torch.no_grad():
                merged = known.subject.predict[task](known.model, batch).float().log_softmax(-1)
            found.append(float((expert.exp() * (expert - merged)).sum(-1).mean()))
    return sum(found) / len(found)


def lengthened(known: Known, name: str, merged_OI: Merge, first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one rule at all lengths, and at fixed scales; equal factors are tested once.

    Args:
        first: the row at length one.
    """
    sums = inner(merged_OI, known.deltas)
    factors = {length: round(rule(sums), 4) for length, rule in LENGTHS.items() if length != "one"}
    wanted = [*factors.items(), *(("fixed", scale) for scale in SCALES)]
    tested = {1.0: {"test": first["test"], "noise": first["noise"]}}
    for length, factor in wanted:
        if factor not in tested:
            tested[factor] = scored(known, merged_OI, factor)
        yield {"rule": name, "length": length, "scale": factor, **tested[factor]}


def aligned(known: Known) -> dict[str, float]:
    """Mean cosine of each estimate with the Gram matrix of the expert's own inputs, over experts and matrices."""
    found = {}
    seen = known.estimates["inputs"]
    for name, grams in known.estimates.items():
        values = [alignment(g[key], c[key]) for g, c in zip(grams, seen, strict=True) for key in known.keys]
        found[name] = round(sum(values) / len(values), 4)
    same = [alignment(torch.eye(len(c[key])), c[key]) for c in seen for key in known.keys]
    return found | {"identity": round(sum(same) / len(same), 4)}
