"""A merged model at any scale, in the memory of one model: to load a checkpoint takes longer than to test it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.vision.backbones import read_tensors


def in_place(load: Callable[[Path], Any], base: Path, merged: Path, acted: Sequence[str]) -> Callable[[float], Any]:
    """From a scale to the merged model at it; see `rescaled`. It is one model, whose weights the next call replaces.

    At scale 1 the weights are those of `merged` to the bit.

    Args:
        load: reads a checkpoint.
        acted: names, in the files, of the tensors that the scale acts on.

    Raises:
        ValueError: a tensor of the file cannot be told among the parameters of the model by its values.
    """
    tensors, first, model = read_tensors(base), load(base), load(merged)
    moved = []
    for name in acted:
        found = _parameters(first, name, tensors[name])
        if len(found) != 1:
            raise ValueError(f"'{name}' of {base} is the value of {len(found)} parameters of the model, not of one")
        start, parameter = first.get_parameter(found[0]).detach(), model.get_parameter(found[0])
        moved.append((parameter, start, parameter.detach().clone()))

    def at(scale: float) -> Any:
        with torch.no_grad():
            for parameter, start, end in moved:
                parameter.copy_(end if scale == 1 else start + scale * (end - start))
        return model

    return at


def _parameters(model: Any, name: str, value: Tensor) -> list[str]:
    """Names of the parameters that have this value; the one that is called as in the file, if it has."""
    known = dict(model.named_parameters())
    if name in known and known[name].equal(value):
        return [name]
    return [n for n, p in known.items() if p.shape == value.shape and p.equal(value)]
