"""The matrices of an encoder of the demo, and what comes into them.

Shapes: `N` images, `H = W` pixels, `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from actmat.demo.model import Encoder
from actmat.statistics.collect import collect
from actmat.statistics.kinds.gram import unpack

__all__ = ["Key", "input_grams", "matrices"]

Key = tuple[str, int]
"""Name of a tensor and number of the block in it."""


def matrices(state: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """The matrices of linear layers: `O I`, views; q, k and v of a packed projection apart."""
    found: dict[Key, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim == 2 and not name.startswith("position_embeddings"):
            blocks = tensor.chunk(3) if name.endswith("in_proj_weight") else (tensor,)
            found |= {(name, k): block for k, block in enumerate(blocks)}
    return found


def input_grams(model: Encoder, images_NHW: Tensor) -> dict[Key, Tensor]:
    """`sum z z^T` over all tokens of the images, `I I`, for the input of every matrix of the model."""
    measured = collect(model, [images_NHW])
    found: dict[Key, Tensor] = {}
    for name, block in matrices(model.state_dict()):
        key = measured.header.places[name][0].gram
        found[name, block] = unpack(measured.tensors[f"gram.{key}"](), measured.header.grams[key].width)
    return found
