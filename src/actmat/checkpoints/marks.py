"""Marks: tensors of at most one entry, such as `v_pred`, by which loaders of single files tell models apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from actmat.checkpoints.composed import Composed, whole
from actmat.checkpoints.memory import LABEL
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import first_names


def with_marks(base: Model, experts: Mapping[str, Model]) -> Model:
    """The base with the marks that all experts hold alike and it lacks; unchanged for models with a config.

    Args:
        base: of a merge; closed with the result.
        experts: label -> a full model.
    """
    if base.config is not None or not experts:
        return base
    parts = {n.partition(".")[0] for e in experts.values() for n, s in e.specs.items() if s.numel > 1}
    lone = {n for e in experts.values() for n in e.specs if n.partition(".")[0] not in parts and n not in base.specs}
    held = {label: {n: e.tensors.read(n) for n in e.specs if n in lone} for label, e in experts.items()}
    first, *others = held.values()
    marks = {n: t for n, t in first.items() if all(n in other and _equal(t, other[n]) for other in others)}
    notes = [f"lacks {first_names(marks)}, which all experts hold alike: written to the output"] if marks else []
    notes += [
        f"lacks {first_names(lost)}, which expert '{label}' holds and not all experts alike: not written. Loaders tell "
        "by such tensors how a model predicts (epsilon or v)"
        for label, tensors in held.items()
        if (lost := [n for n, t in tensors.items() if n not in marks and not t.numel()])
    ]
    if not notes:
        return base
    stored, of_first = base.tensors, next(iter(experts.values())).specs
    tensors = Composed(
        [stored],
        {name: whole(spec) for name, spec in stored.specs.items()}
        | {n: (bytes(raw_bytes(t)),) for n, t in marks.items()},
        {**stored.specs, **{name: replace(of_first[name], file=LABEL, offset=0) for name in marks}},
        stored.aliases,
    )
    return replace(base, tensors=tensors, folder=base.folder.noted(*notes))


def _equal(mark: Tensor, other: Tensor) -> bool:
    return (mark.dtype, mark.shape) == (other.dtype, other.shape) and torch.equal(mark, other)
