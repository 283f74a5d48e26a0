"""Merge subsets of the experts of one model with many rules, in memory; measure what is lost and what might tell it.

Shapes: `N` images, `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from actmat.demo.evaluate import correct
from actmat.demo.evaluate import features as encode
from actmat.demo.model import Encoder
from actmat.linalg.outputs import output_features
from actmat.matrices import merge_matrices
from actmat.methods import METHODS, get_method
from actmat_experiments.forecast.models import Trained
from actmat_experiments.forecast.parts import Key, input_grams, matrices
from actmat_experiments.linalg.forecast import Leading, activation_features, energies, features

__all__ = ["SUBSETS", "UNLABELLED", "Row", "measure", "rules"]

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
        family, seed: the model.
        method, scale, experts: the merge.
        task: of this expert.
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
        """What is lost: the expert's accuracy less the merged model's."""
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
        for m in METHODS
        if not m.needs_statistics and (m.max_experts is None or n_experts <= m.max_experts) and m.name != "adamerging"
    ]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is the same for all merges of one model."""

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
