"""The linear maps of a model that is in memory: as matrices, with the Gram matrices of their inputs.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from actmat_experiments.core import collect_unbound, unpack

Key = tuple[str, int]
"""Name of a tensor and number of the block in it."""


def linear_maps(model: nn.Module) -> dict[str, int]:
    """Name of every tensor that holds linear maps -> number of blocks: 3 of a packed attention projection, else 1.

    A tensor that is an embedding too is left out.

    >>> linear_maps(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Conv2d(1, 2, 3)))
    {'0.weight': 1, '2.weight': 1}
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) not in embeddings:
            found[f"{prefix}weight"] = 1
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            found[f"{prefix}in_proj_weight"] = 3
    return found


def matrices(state: Mapping[str, Tensor], maps: Mapping[str, int]) -> dict[Key, Tensor]:
    """The maps as `O I` matrices, views of the state; kernels of convolutions flattened."""
    return {
        (name, k): block
        for name, blocks in maps.items()
        for k, block in enumerate(state[name].flatten(1).chunk(blocks) if blocks > 1 else (state[name].flatten(1),))
    }


def input_grams(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], maps: Mapping[str, int]
) -> dict[Key, Tensor]:
    """`sum z z^T`, `I I`, over all inputs `z` of every map while the model reads the batches."""
    measured = collect_unbound(model, batches)
    found: dict[Key, Tensor] = {}
    for name, blocks in maps.items():
        places = measured.header.places.get(name, ())
        for k in range(blocks if places else 0):
            key = next(iter(places)).gram
            found[name, k] = unpack(measured.tensors[f"gram.{key}"](), measured.header.grams[key].width).float()
    return found


def assembled(
    base: Mapping[str, Tensor],
    experts: Iterable[Mapping[str, Tensor]],
    merged_OI: Mapping[Key, Tensor],
    maps: Mapping[str, int],
) -> dict[str, Tensor]:
    """Weights of the merged model: base and merged deltas on the maps, the mean of the experts elsewhere.

    >>> base = {"w": torch.zeros(1, 2), "b": torch.zeros(1)}
    >>> experts = [{"w": torch.ones(1, 2), "b": torch.ones(1)}, {"w": torch.ones(1, 2), "b": torch.zeros(1)}]
    >>> found = assembled(base, experts, {("w", 0): torch.full((1, 2), 5.0)}, {"w": 1})
    >>> found["w"].tolist(), found["b"].tolist()
    ([[5.0, 5.0]], [0.5])
    """
    others = list(experts)
    state = {}
    for name, weight in base.items():
        if name in maps:
            state[name] = weight.clone()
        elif weight.is_floating_point():
            state[name] = weight + torch.stack([e[name] - weight for e in others]).mean(0)
        else:
            state[name] = weight
    for key, block in matrices(state, maps).items():
        block += merged_OI[key]
    return state
