"""Rules and their merges of one subject, one at a time and matrix by matrix: memory holds one layer's estimates.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actmat import merge_matrices
from actmat_experiments.datafree.grams import alignment, delta_gram, merge_by, mixed, moved_gram
from actmat_experiments.datafree.matrices import Key, matrices
from benchmarks.pretrained.grams import StoredGrams, store_grams
from benchmarks.pretrained.subjects import Inputs, Subject

CHOICES = ("average", "tsv", "iso_c", "actmat", "actmat_ridge", "aswudi")
"""Methods without data among which inputs choose, at every scale."""
CLOSED = ("cart", "dc_merge")
"""Later methods without data, whose closed forms lie around the average; they are no candidates of the choice."""
OVER_PRIOR = "delta over base's inputs, 0.5"

Merge = dict[Key, Tensor]
Grams = Callable[[Key], list[Tensor]]


@dataclass(frozen=True)
class Estimates:
    """Second moments of inputs that were measured, by expert.

    Args:
        inputs: on the inputs of the expert's task that are there to measure on.
        fewer: on the first half of those.
        noise: on noise.
        prior: of the base, on noise; the others are empty where only this was measured.
    """

    inputs: Sequence[StoredGrams]
    fewer: Sequence[StoredGrams]
    noise: Sequence[StoredGrams]
    prior: StoredGrams


def half_of(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The first inputs and the others, by their positions."""
    cut = len(inputs) // 2
    sides: tuple[list[tuple[Tensor, dict[str, Tensor]]], ...] = ([], [])
    for index, arguments in inputs.batches:
        for side, kept in zip(sides, (index < cut, index >= cut), strict=True):
            if kept.any():
                moved = index[kept] - (0 if side is sides[0] else cut)
                side.append((moved, {k: v[kept] for k, v in arguments.items()}))
    return Inputs(sides[0], inputs.labels_N[:cut]), Inputs(sides[1], inputs.labels_N[cut:])


def estimate(subject: Subject, folder: Path, *, quick: bool = False) -> Estimates:
    """Measure what rules and references need; only the base's on noise if `quick`."""
    subject.write_base()
    prior = store_grams(subject, subject.noise, folder / "prior.safetensors")
    found: dict[str, list[StoredGrams]] = {"inputs": [], "fewer": [], "noise": []}
    for n, task in enumerate(subject.tasks if not quick else ()):
        subject.write_expert(task)
        given = {"inputs": subject.measured[task], "fewer": half_of(subject.measured[task])[0], "noise": subject.noise}
        for name, inputs in given.items():
            found[name].append(store_grams(subject, inputs, folder / f"{name}-{n}.safetensors"))
    return Estimates(found["inputs"], found["fewer"], found["noise"], prior)


def weight_free(subject: Subject, known: Estimates) -> dict[str, Grams]:
    """Estimates without data of the experts' second moments, of one matrix."""
    start_OI = matrices(subject.base, subject.maps)
    deltas = list(subject.deltas.values())
    found: dict[str, Grams] = {
        "delta": lambda key: [delta_gram(d[key]) for d in deltas],
        "noise": lambda key: [g[key] for g in known.noise],
        "weights": lambda key: [delta_gram(start_OI[key] + d[key]) for d in deltas],
    }
    if subject.factors:
        some = list(subject.factors.values())
        found["movement of A"] = lambda key: [moved_gram(f[key][1], f[key][2]) for f in some]
        found["movement of A by use"] = lambda key: [moved_gram(f[key][1], f[key][2], f[key][0]) for f in some]
    return found


def rules(subject: Subject, known: Estimates) -> Iterator[tuple[str, Merge]]:
    """Rules and their merges at length one; those among which inputs choose first."""
    deltas = list(subject.deltas.values())
    for method in (*CHOICES, *CLOSED):
        yield method, by_method(subject, method)
    yield OVER_PRIOR, by_estimates(subject, weight_free(subject, known)["delta"], 0.5, known.prior)
    if not known.inputs:
        return
    for name, seen in (("inputs, regmean", known.inputs), ("inputs, regmean by half", known.fewer)):
        found: Merge = {}
        for key in subject.keys:
            grams = {"gram": [g[key] for g in seen]}
            found[key] = merge_matrices("regmean", [d[key] for d in deltas], statistics=grams)
        yield name, found
    yield "inputs, 0.9", by_estimates(subject, lambda key: [g[key] for g in known.inputs], 0.9)
    for name, estimates in weight_free(subject, known).items():
        yield f"{name}, 0.5", by_estimates(subject, estimates, 0.5)


def by_method(subject: Subject, method: str) -> Merge:
    """The merge by a method without data, at its defaults."""
    deltas = list(subject.deltas.values())
    return {key: merge_matrices(method, [d[key].contiguous() for d in deltas]) for key in subject.keys}


def by_estimates(subject: Subject, grams: Grams, share: float, prior: Mapping[Key, Tensor] | None = None) -> Merge:
    """The merge by estimates, mixed with the identity or a prior."""
    deltas = list(subject.deltas.values())
    found = {}
    for key in subject.keys:
        other = None if prior is None else mixed(prior[key], 0.99)
        found[key] = merge_by([d[key] for d in deltas], [mixed(g, share, other) for g in grams(key)])
    return found


def aligned(subject: Subject, known: Estimates) -> dict[str, float]:
    """Mean cosine of each estimate with the Gram matrix of the expert's own inputs, over experts and matrices."""
    kinds = {**weight_free(subject, known), "identity": lambda key: [torch.eye(d[key].shape[1]) for d in deltas]}
    deltas = list(subject.deltas.values())
    totals = dict.fromkeys(kinds, 0.0)
    for key in subject.keys:
        seen = [g[key] for g in known.inputs]
        for name, grams in kinds.items():
            totals[name] += sum(alignment(g, c) for g, c in zip(grams(key), seen, strict=True))
    return {name: round(total / len(deltas) / len(subject.keys), 4) for name, total in totals.items()}
