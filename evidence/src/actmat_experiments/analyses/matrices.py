"""Logical matrices of checkpoints, named as the taps of a model name them, one stored tensor in memory at a time.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actmat import open_model
from actmat.errors import AlignmentError, RecipeError
from actmat_experiments.core import Model, Statistics, resolve_layout

Source = str | Path | Model
"""A checkpoint, or where it is."""

Grams = Mapping[str, Mapping[str, Tensor] | Statistics]
"""expert -> its Gram matrices `E[z z^T]`, `I x I`: by name of the linear map, or a file of statistics."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear map in all checkpoints: `base_OI`, and by name of the other checkpoint `others_OI`.

    `tensor` is the stored tensor's name, `rows` the map's rows in it where it is packed in one piece.
    """

    name: str
    tensor: str
    rows: tuple[int, int] | None
    base_OI: Tensor
    others_OI: Mapping[str, Tensor]


def layers_of(base: Source, others: Mapping[str, Source]) -> Iterator[Layer]:
    """Every linear map of the base with its counterparts, in the base's storage order.

    Matrices that are stacked over the experts of a mixture are left out.

    Raises:
        AlignmentError: lists tensors that another one lacks or has in another shape.
    """
    with contextlib.ExitStack() as stack:
        opened = {n: stack.enter_context(_opened(s)) for n, s in others.items()}
        origin = stack.enter_context(_opened(base))
        layouts = resolve_layout(origin.specs, origin.config)
        wanted = [
            n for n, layout in layouts.tensors.items() if layout.role.is_matrix and len(origin.specs[n].shape) == 2
        ]
        problems = [
            f"{other.location}: {name} is {'missing' if name not in other.specs else other.specs[name].shape}, "
            f"the base has {origin.specs[name].shape}"
            for name in wanted
            for other in opened.values()
            if name not in other.specs or other.specs[name].shape != origin.specs[name].shape
        ]
        if problems:
            raise AlignmentError("The checkpoints are not of one base.", problems)
        for tensor in wanted:
            layout = layouts.tensors[tensor]
            places = [(f"{tensor}[{b.name}]", (b.start, b.stop) if b.groups == 1 else None) for b in layout.blocks]
            read = {n: layout.to_matrices(c.tensors.read(tensor)) for n, c in opened.items()}
            own = layout.to_matrices(origin.tensors.read(tensor))
            for index, ((label, rows), matrix) in enumerate(zip(places or [(tensor, None)], own, strict=True)):
                yield Layer(label, tensor, rows, matrix, {n: m[index] for n, m in read.items()})


def grams_of(layer: Layer, experts: Iterable[str], grams: Grams) -> dict[str, Tensor] | None:
    """The Gram matrices of a layer by expert, float64, or None where one of them is missing."""
    found: dict[str, Tensor] = {}
    for expert in experts:
        source = grams[expert]
        if isinstance(source, Statistics):
            key = source.find(layer.tensor, rows=layer.rows)
            if key is None or source.header.grams[key].groups > 1:
                return None
            found[expert] = source.gram(key, dtype=torch.float64)
        elif layer.name in source:
            found[expert] = source[layer.name].double()
        else:
            return None
    return found


def need_experts(experts: Mapping[str, Source], grams: Grams) -> None:
    """Every expert has Gram matrices.

    Raises:
        RecipeError: no experts, or an expert without matrices.
    """
    missing = [f"'{n}' has no Gram matrices" for n in experts if n not in grams]
    if missing or not experts:
        raise RecipeError("The analysis compares every expert with the inputs of its own task.", missing)


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[Model]:
    """A checkpoint that was given open stays open."""
    if isinstance(source, Model):
        yield source
    else:
        with open_model(source) as checkpoint:
            yield checkpoint
