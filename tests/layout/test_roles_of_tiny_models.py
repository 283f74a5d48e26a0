"""Roles and orientations of whole checkpoints on disk, against what the torch modules that were saved say."""

from pathlib import Path

import pytest
import torch
from tests.helpers.tinymodels import build, saved, specs_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Role

FAMILIES = [
    "llama", "llama_tied", "mixtral", "qwen2_moe", "granitemoe", "phi3", "gpt2", "gpt_bigcode", "codegen", "gpt_neox",
    "falcon_new", "bloom", "mpt", "modernbert", "bert", "deberta", "t5", "clip", "vit", "resnet", "qwen3_next", "mamba",
    "whisper",
]  # fmt: skip

LINEAR = {Role.LINEAR, Role.FUSED_LINEAR, Role.ROUTER}


def modules_by_value(model: nn.Module) -> dict[tuple[int, ...], list[tuple[torch.Tensor, nn.Module]]]:
    """Weights of all layers that own one, by shape: transformers renames on its way to disk, the values stay."""
    out: dict[tuple[int, ...], list[tuple[torch.Tensor, nn.Module]]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
            out.setdefault(tuple(weight.shape), []).append((weight.detach(), module))
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_on_disk_has_the_role_of_its_module(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build(family)
    tiny = saved(model, tmp_path)
    layouts = resolve_layout(tiny.specs, tiny.config)
    assert layouts.tensors.keys() == tiny.specs.keys()
    by_value = modules_by_value(model)
    checked = 0
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        layout = layouts.tensors[name]
        assert layout.reason
        if tensor.ndim < 2 or not tensor.is_floating_point():
            assert layout.role in {Role.VECTOR, Role.BUFFER, Role.EMBEDDING}, name
            continue
        owners = [m for weight, m in by_value.get(tuple(tensor.shape), []) if torch.equal(weight, tensor)]
        if not owners:
            continue
        checked += 1
        # a tied parameter has two owners; it counts as a table
        if any(isinstance(m, nn.Embedding) for m in owners):
            assert layout.role is Role.EMBEDDING, (name, layout)
        elif isinstance(owners[0], Conv1D):
            assert layout.role in LINEAR, (name, layout)
            assert layout.orientation == "IO", (name, layout)
        elif isinstance(owners[0], nn.Linear):
            assert layout.role in LINEAR, (name, layout)
            assert layout.orientation == "OI", (name, layout)
        elif isinstance(owners[0], nn.Conv1d | nn.Conv2d):
            assert layout.role is Role.CONVOLUTION, (name, layout)
    assert checked >= 4


def test_clip_and_vit_tokens_and_positions_are_embeddings(tmp_path: Path) -> None:
    clip = saved(build("clip"), tmp_path / "clip")
    vit = saved(build("vit"), tmp_path / "vit")
    of_clip = resolve_layout(clip.specs, clip.config).tensors
    of_vit = resolve_layout(vit.specs, vit.config).tensors
    assert of_clip["vision_model.embeddings.class_embedding"].role is Role.EMBEDDING
    assert of_clip["logit_scale"].role is Role.VECTOR
    assert of_clip["visual_projection.weight"].orientation == "OI"
    assert of_clip["text_projection.weight"].orientation == "OI"
    assert of_vit["vit.embeddings.cls_token"].role is Role.EMBEDDING
    assert of_vit["vit.embeddings.position_embeddings"].role is Role.EMBEDDING
    assert {layout.role for name, layout in of_clip.items() if "norm" in name} == {Role.VECTOR}


def test_recurrent_layers_split_into_gates() -> None:
    state = nn.LSTM(6, 5).state_dict() | {f"gru.{k}": v for k, v in nn.GRU(6, 5).state_dict().items()}
    layouts = resolve_layout(specs_of(state), None).tensors
    assert [b.name for b in layouts["weight_ih_l0"].blocks] == ["i", "f", "g", "o"]
    assert [b.name for b in layouts["gru.weight_hh_l0"].blocks] == ["r", "z", "n"]
    plain = resolve_layout(specs_of(nn.RNN(6, 5).state_dict()), None).tensors
    assert plain["weight_ih_l0"].role is Role.LINEAR
