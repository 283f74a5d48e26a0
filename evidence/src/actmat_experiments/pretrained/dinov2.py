"""A ViT of DINOv2's architecture out of an ONNX graph, as a checkpoint that `Dinov2Model` loads.

The exporter of PyTorch keeps the names of biases and norms, and folds constants into unnamed ones: the weight
of a linear layer is the second input of a `MatMul` whose node carries the layer's name, transposed; the table of
positions is two constants, the class token's and the patches'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.errors import CheckpointError
from actmat_experiments.harness.models import LOADING

_MATMUL = "/MatMul"
_PREFIX = "backbone"
_EMBEDDINGS = "embeddings.position_embeddings"


def convert_vit(path: Path, out: Path, *, head_width: int = 64) -> None:
    """Write the encoder of a graph as a folder for `Dinov2Model.from_pretrained`.

    Args:
        path: ONNX file.
        head_width: features per attention head; the graph does not store it as a weight.

    Raises:
        CheckpointError: the library `onnx` is missing, or the graph is not such an encoder; names the missing parts.
    """
    from safetensors.torch import save_file
    from transformers import Dinov2Config, Dinov2Model

    tensors = vit_tensors(path)
    try:
        config = Dinov2Config(**_sizes(tensors, head_width), use_mask_token=False)
    except KeyError as error:
        raise CheckpointError(
            f"{path} holds no encoder of DINOv2's architecture under '{_PREFIX}': no {error}."
        ) from None
    out.mkdir(parents=True, exist_ok=True)
    config.architectures = [Dinov2Model.__name__]
    config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with LOADING:
        _, info = Dinov2Model.from_pretrained(out, output_loading_info=True)
    problems = [f"{kind}: {name}" for kind in ("missing_keys", "unexpected_keys") for name in sorted(info[kind])]
    problems += [f"another shape: {name}" for name in info["mismatched_keys"]]
    if problems:
        raise CheckpointError(f"{path} holds no encoder of DINOv2's architecture under '{_PREFIX}'.", problems)


def _sizes(tensors: Mapping[str, Tensor], head_width: int) -> dict[str, int]:
    """Sizes of the architecture, read off the shapes."""
    width, channels, _, patch = tensors["embeddings.patch_embeddings.projection.weight"].shape
    positions = tensors[_EMBEDDINGS].shape[1] - 1
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": patch * math.isqrt(positions),
        "num_hidden_layers": len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}),
        "num_attention_heads": max(1, width // head_width),
        "mlp_ratio": tensors["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
    }


def vit_tensors(path: Path) -> dict[str, Tensor]:
    """Weights of the encoder under the names of `Dinov2Model`.

    Raises:
        CheckpointError: see `convert_vit`.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise CheckpointError(
            "The ViT is published as an ONNX graph, which is read with the library onnx: pip install onnx."
        ) from error
    graph = onnx.load(str(path)).graph
    constants = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
    found = {n.removeprefix(f"{_PREFIX}."): t for n, t in constants.items() if n.startswith(f"{_PREFIX}.")}
    start = f"/{_PREFIX}/"
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith(start) and node.input[1] in constants:
            name = node.name.removeprefix(start).removesuffix(_MATMUL).replace("/", ".")
            found[f"{name}.weight"] = constants[node.input[1]].mT.contiguous()
    found[_EMBEDDINGS] = _positions(graph.node, constants, f"{start}embeddings/", path)
    return found


def _positions(nodes: Iterable[Any], constants: Mapping[str, Tensor], start: str, path: Path) -> Tensor:
    """`1 (1 + patches) D`: the constant that is concatenated before the resized table, and that table."""
    by_type: dict[str, list[Tensor]] = {"Concat": [], "Reshape": []}
    for node in nodes:
        if node.op_type in by_type and node.name.startswith(start):
            by_type[node.op_type] += [constants[i] for i in node.input if i in constants and constants[i].dim() == 3]
    if any(len(some) != 1 for some in by_type.values()):
        raise CheckpointError(
            f"{path}: expected one constant for the class token's position and one for the patches' under {start}, "
            f"found {len(by_type['Concat'])} and {len(by_type['Reshape'])}."
        )
    return torch.cat([by_type["Concat"][0], by_type["Reshape"][0]], dim=1)
