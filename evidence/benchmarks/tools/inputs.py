"""Inputs of the comparison, and the merges of them in float64.

Models are random; experts differ from their base by noise of three tenths of each tensor's size, in which spheres and
masks show. The adapters are of rank 8 on the attention of the tiny Llama.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.adapters import write_adapters
from benchmarks.common import stored_tensors
from benchmarks.make_llama import Size, make_family

EXPERTS = 3
CHANGE = 0.3
LLAMA = Size(hidden=512, intermediate=1408, layers=8, heads=8, key_value_heads=4, vocabulary=8000)
Tensors = dict[str, Tensor]


def make(name: str, folder: Path) -> tuple[Path, list[Path]]:
    """Base and experts of one kind of input; those that are there are kept."""
    if name == "three LoRA":
        base, _ = make("Llama", folder.parent / "Llama")
        sizes = (LLAMA.hidden, LLAMA.intermediate, LLAMA.layers)
        return base, write_adapters(folder / "lora", EXPERTS, 8, *sizes, ("q_proj", "o_proj"))
    if "Llama" in name:
        size, dtype = (LLAMA, "float32") if name == "Llama" else (Size(), "bfloat16")
        return make_family(folder, size, EXPERTS, change=CHANGE, dtype=dtype, shard_bytes=1 << 40)
    base = folder / "base"
    if not base.exists():
        torch.manual_seed(0)
        _vit(base) if name == "ViT" else _unet(base)
        (file,) = base.glob("*.safetensors")
        for expert in range(EXPERTS):
            place = folder / f"expert-{expert}"
            shutil.copytree(base, place)
            save_file({n: _moved(t) for n, t in stored_tensors(base).items()}, place / file.name, {"format": "pt"})
    return base, [folder / f"expert-{t}" for t in range(EXPERTS)]


def _moved(tensor: Tensor) -> Tensor:
    return tensor + CHANGE * float(tensor.square().mean().sqrt()) * torch.randn_like(tensor)


def _vit(place: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=6)
    ViTForImageClassification(config).save_pretrained(place)


def _unet(place: Path) -> None:
    """Levels, attention and conditions of SDXL's UNet, a tenth as wide."""
    from diffusers import UNet2DConditionModel

    UNet2DConditionModel(
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 2, 10],
        attention_head_dim=[2, 4, 8],
        cross_attention_dim=256,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=320,
    ).save_pretrained(place)


def deltas_of(folder: Path, base: Tensors | None = None, part: str = "") -> Tensors:
    """Changes of the weights of an adapter, or of a model from its base, in float64; of the names that hold `part`."""
    stored = {n: t for n, t in stored_tensors(folder).items() if part in n}
    config = folder / "adapter_config.json"
    if not config.exists():
        assert base is not None
        return {n: t.double() - base[n].double() for n, t in stored.items()}
    given = json.loads(config.read_text())
    found = {}
    for name, a_RI in stored.items():
        if ".lora_A" in name:
            module = name.partition(".lora_A")[0].removeprefix("base_model.model.")
            b_OR = stored[name.replace("lora_A", "lora_B")].double()
            rank = len(a_RI)
            scaling = given["lora_alpha"] / (rank**0.5 if given.get("use_rslora") else rank)
            found[f"{module}.weight"] = scaling * (b_OR @ a_RI.double())
    return found


def _ties(_: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    kept = []
    for delta in deltas:
        flat = delta.flatten()
        order = flat.abs().argsort(descending=True, stable=True)[: max(1, int(0.2 * flat.numel()))]
        kept.append(torch.zeros_like(flat).index_copy(0, order, flat[order]).view_as(delta))
    stacked = torch.stack(kept)
    agree = stacked.sign() == torch.where(stacked.sum(0) < 0, -1.0, 1.0)
    return (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)


def _slerp(base: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    one, other = (base + d for d in deltas[:2])
    angle = torch.arccos((one.flatten() @ other.flatten() / (one.norm() * other.norm())).clamp(-1, 1))
    share = torch.sin(angle / 2) / torch.sin(angle) if angle > 0 else 0.5
    return share * (one + other) - base


REFERENCES: dict[str, Callable[[Tensor, Sequence[Tensor]], Tensor]] = {
    "average": lambda _, deltas: torch.stack(list(deltas)).mean(0),
    "task_arithmetic": lambda _, deltas: 0.4 * torch.stack(list(deltas)).sum(0),
    "ties": _ties,
    "slerp": _slerp,
}
"""Method -> its delta in float64. Slerp is of the first two experts, TIES keeps a fifth of each tensor's
entries, exactly, of equal ones the first, and takes plus where votes cancel, as mergekit does."""


def error(method: str, out: Path, base: Path, experts: Sequence[Path], part: str = "") -> float:
    """Largest distance of a merged tensor's change from the reference, relative in the Frobenius norm."""
    start = stored_tensors(base)
    merged, *each = (deltas_of(folder, start, part) for folder in (out, *experts))
    worst = 0.0
    for name in each[0]:
        expected = REFERENCES[method](start[name].double(), [d[name] for d in each])
        size = float(expected.norm()) or 1.0
        worst = max(worst, float((merged[name] - expected).norm()) / size)
    return worst
