"""Merge subsets of the experts of one model by many methods, in memory; measure losses and candidate forecasts.

The rows of every model are kept in one JSON file: a study that was interrupted goes on with the next model.

Shapes: `N` images, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat import merge_matrices
from actmat.extras.demo.heads import correct
from actmat.extras.demo.heads import features as encode
from actmat.extras.demo.model import Encoder
from actmat_experiments.core import all_methods, get_method, one_thread, output_features
from actmat_experiments.forecast.features import Leading, activation_features, energies, features
from actmat_experiments.forecast.models import FAMILIES, Family, Key, Trained, input_grams, matrices, train
from actmat_experiments.harness.cache import Cache, library_versions

UNLABELLED = 64
"""Images of the validation part that the numbers with data see, without their labels."""

SUBSETS: tuple[tuple[int, ...], ...] = (
    (0, 1, 2, 3, 4, 5),
    (0, 1, 2),
    (3, 4, 5),
    (0, 2, 3, 5),
    (0, 3),
    (1, 4),
    (2, 5),
    (0, 4),
)
"""Which experts are merged, by their place in the tasks of the demo: every expert alone with one other, and more."""

SCALES = (1.0, 0.4)
"""Of the matrices' merged delta; the other tensors are averaged at scale 1, as in a merge."""


@dataclass(frozen=True, slots=True)
class Row:
    """One expert of one merge.

    Args:
        accuracy, merged_accuracy: of the expert and of the merged model on the task's test images.
        features: numbers that might tell the difference.
    """

    family: str
    seed: int
    method: str
    scale: float
    experts: tuple[str, ...]
    task: str
    accuracy: float
    merged_accuracy: float
    features: Mapping[str, float]

    @property
    def drop(self) -> float:
        """The expert's accuracy less the merged model's."""
        return self.accuracy - self.merged_accuracy

    @property
    def model(self) -> str:
        """Name of the model."""
        return f"{self.family}/{self.seed}"

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def rules(n_experts: int) -> list[str]:
    """Names of the rules that merge that many experts without data and without running the model."""
    return [
        m.name
        for m in all_methods()
        if not m.needs_statistics and (m.max_experts is None or n_experts <= m.max_experts) and m.name != "adamerging"
    ]


@dataclass(frozen=True, slots=True)
class _Known:
    """Values that all merges of one model share."""

    trained: Trained
    base: Mapping[str, Tensor]
    base_OI: Mapping[Key, Tensor]
    delta_OI: Mapping[str, Mapping[Key, Tensor]]
    leading: Mapping[str, Mapping[Key, Leading]]
    base_leading: Mapping[Key, Leading]
    grams: Mapping[str, Mapping[Key, Tensor]]
    logits: Mapping[str, Tensor]
    accuracy: Mapping[str, float]


def measure(
    trained: Trained,
    family: str,
    seed: int,
    *,
    subsets: Sequence[Sequence[int]] = SUBSETS,
    methods: Callable[[int], Sequence[str]] = rules,
    scales: Sequence[float] = SCALES,
) -> Iterator[Row]:
    """One row per merge and expert."""
    known = _know(trained)
    names = list(trained.experts)
    for subset in subsets:
        chosen = tuple(names[k] for k in subset)
        for method in methods(len(chosen)):
            merged_OI = {key: _merge(method, known, chosen, key) for key in known.base_OI}
            for scale in scales:
                scaled = {key: scale * m for key, m in merged_OI.items()}
                yield from _score(known, family, seed, method, scale, chosen, scaled)


def _know(trained: Trained) -> _Known:
    base = {n: t.detach() for n, t in trained.base.state_dict().items()}
    base_OI = matrices(base)
    states = {task: matrices(e.state_dict()) for task, e in trained.experts.items()}
    delta_OI = {task: {key: state[key] - w for key, w in base_OI.items()} for task, state in states.items()}
    return _Known(
        trained=trained,
        base=base,
        base_OI=base_OI,
        delta_OI=delta_OI,
        leading={task: {key: Leading.of(d) for key, d in deltas.items()} for task, deltas in delta_OI.items()},
        base_leading={key: Leading.of(w) for key, w in base_OI.items()},
        grams={task: input_grams(e, _unlabelled(trained, task)) for task, e in trained.experts.items()},
        logits={
            task: trained.heads[task](encode(e, _unlabelled(trained, task))) for task, e in trained.experts.items()
        },
        accuracy={task: _accuracy(trained, task, e) for task, e in trained.experts.items()},
    )


def _merge(method: str, known: _Known, chosen: Sequence[str], key: Key) -> Tensor:
    rule = get_method(method)
    base = known.base_OI[key] if rule.uses_base(rule.resolve_options({})) else None
    return merge_matrices(method, [known.delta_OI[task][key].contiguous() for task in chosen], base=base)


def _score(
    known: _Known,
    family: str,
    seed: int,
    method: str,
    scale: float,
    chosen: tuple[str, ...],
    merged_OI: Mapping[Key, Tensor],
) -> Iterator[Row]:
    model = _assemble(known, chosen, merged_OI)
    found = features(
        [
            energies(
                [known.delta_OI[task][key] for task in chosen],
                m,
                known.base_OI[key],
                leading=[*(known.leading[task][key] for task in chosen), known.base_leading[key]],
            )
            for key, m in merged_OI.items()
        ]
    )
    keys = list(merged_OI)
    for t, task in enumerate(chosen):
        deltas = [known.delta_OI[task][key] for key in keys]
        with_data = activation_features(
            deltas,
            [merged_OI[key] for key in keys],
            [known.base_OI[key] + d for key, d in zip(keys, deltas, strict=True)],
            [known.grams[task][key] for key in keys],
        )
        logits = known.trained.heads[task](encode(model, _unlabelled(known.trained, task)))
        yield Row(
            family=family,
            seed=seed,
            method=method,
            scale=scale,
            experts=chosen,
            task=task,
            accuracy=known.accuracy[task],
            merged_accuracy=_accuracy(known.trained, task, model),
            features={name: values[t] for name, values in found.items()}
            | with_data
            | output_features(logits, known.logits[task]),
        )


def _assemble(known: _Known, chosen: Sequence[str], merged_OI: Mapping[Key, Tensor]) -> Encoder:
    """The merged model: matrices by the rule, the mean of the deltas elsewhere, as the engine does by default."""
    states = [known.trained.experts[task].state_dict() for task in chosen]
    merged = {
        name: weight + torch.stack([s[name] - weight for s in states]).mean(0) for name, weight in known.base.items()
    }
    for (name, block), delta in merged_OI.items():
        matrices({name: merged[name]})[name, block].copy_(known.base_OI[name, block] + delta)
    with torch.device("meta"):
        model = Encoder(known.trained.base.config)
    model.load_state_dict(merged, assign=True)
    return model


def _unlabelled(trained: Trained, task: str) -> Tensor:
    return trained.data[task].validation.images_NHW[:UNLABELLED]


def _accuracy(trained: Trained, task: str, model: Encoder) -> float:
    return float(correct(model, trained.heads[task], trained.data[task].test).double().mean())


VERSION = 1
"""Of what a row holds and of how models are merged: rows of another version are measured again."""

_FILE = "rows.json"


def rows_of(
    cache: Cache,
    families: Sequence[Family] = FAMILIES,
    seeds: Sequence[int] = (0,),
    *,
    subsets: Sequence[Sequence[int]] = SUBSETS,
    methods: Callable[[int], Sequence[str]] = rules,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Train and measure what is not measured yet, seed by seed; all rows.

    Args:
        progress: told the name of a model before it is made or read.
    """
    rows = []
    for seed in seeds:
        for family in families:
            progress(f"{family.name}/{seed}")
            place = cache.get(
                "forecast-rows",
                _key(family, seed, subsets, methods),
                partial(_make, family, seed, subsets, methods),
            )
            rows += read_rows(place)
    return rows


def measured(cache: Cache, families: Sequence[Family] = FAMILIES, seeds: Sequence[int] = (0,)) -> dict[str, list[Row]]:
    """Rows of the models that are measured already, by model."""
    found = {}
    for seed in seeds:
        for family in families:
            key = _key(family, seed, SUBSETS, rules)
            if cache.holds("forecast-rows", key):
                found[f"{family.name}/{seed}"] = read_rows(cache.path("forecast-rows", key))
    return found


def read_rows(place: Path) -> list[Row]:
    """Rows as `rows_of` has written them."""
    raw = json.loads((place / _FILE).read_text(encoding="utf-8"))
    return [Row(**row | {"experts": tuple(row["experts"])}) for row in raw]


def _key(
    family: Family, seed: int, subsets: Sequence[Sequence[int]], methods: Callable[[int], Sequence[str]]
) -> Mapping[str, Any]:
    """All that determines the rows of one model; the name of a family does not."""
    return {
        "version": VERSION,
        "family": asdict(replace(family, name="")),
        "settings": asdict(family.settings),
        "seed": seed,
        "subsets": [list(s) for s in subsets],
        "methods": {str(n): list(methods(n)) for n in sorted({len(s) for s in subsets})},
        "scales": list(SCALES),
        "unlabelled": UNLABELLED,
        "libraries": library_versions("torch", "scikit-learn"),
    }


def _make(
    family: Family, seed: int, subsets: Sequence[Sequence[int]], methods: Callable[[int], Sequence[str]], out: Path
) -> None:
    with one_thread():
        rows = list(measure(train(family, seed), family.name, seed, subsets=subsets, methods=methods))
    (out / _FILE).write_text(json.dumps([row.to_json() for row in rows], allow_nan=False), encoding="utf-8")
