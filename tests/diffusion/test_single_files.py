"""Single files of image tools: merged as they are, known by their names, refused together with a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.diffusion import moved, pipeline, single_file
from tests.helpers.models import stored
from tests.helpers.tinymodels import specs_of

import actmat
from actmat.checkpoints.base import TensorSpec
from actmat.errors import CheckpointError
from actmat.extras.diffusion.architectures import ARCHITECTURES, unet_paths
from actmat.layout.components import single_file_of
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Role

QUICK: dict[str, Any] = {"threads": 1, "durable": False}
SD1 = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base and two experts, each as a pipeline and as a single file."""
    home = tmp_path_factory.mktemp("both")
    for name, seed in (("base", 0), ("e1", 1), ("e2", 2)):
        loaded = pipeline(home / f"t{seed}")
        for part in (loaded.unet, loaded.vae, loaded.text_encoder) if seed else ():
            moved(part, seed)
        loaded.save_pretrained(home / name)
        save_file(single_file(loaded), home / f"{name}.safetensors")
    return home


def test_single_files_merge_as_they_are(both: Path, tmp_path: Path) -> None:
    report = actmat.merge(both / "base.safetensors", [both / "e1.safetensors", both / "e2.safetensors"],
                          out=tmp_path / "out", **QUICK)  # fmt: skip
    note = next(n for n in map(str, report.plan.notes) if n.startswith("the base is"))
    assert "Stable Diffusion 1 in the layout of its own tool" in note
    assert "first_stage_model.* (VAE)" in note
    found = load_file(Path(report.out) / "model.safetensors")
    assert found.keys() == load_file(both / "base.safetensors").keys()
    folders = actmat.merge(both / "base", [both / "e1", both / "e2"], out=tmp_path / "folders", **QUICK)
    unet = stored(Path(folders.out) / "unet")
    name = "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.weight"
    own = "model.diffusion_model.input_blocks.3.1.transformer_blocks.0.ff.net.0.proj.weight"
    assert torch.equal(found[own], unet[name])
    assert torch.equal(found["model.diffusion_model.input_blocks.0.0.weight"], unet["conv_in.weight"])


def test_a_part_that_an_expert_lacks_is_copied(both: Path, tmp_path: Path) -> None:
    inner = {
        n.removeprefix("model.diffusion_model."): t
        for n, t in load_file(both / "e1.safetensors").items()
        if n.startswith("model.diffusion_model.")
    }
    save_file(inner, tmp_path / "unet_only.safetensors")
    plan = actmat.plan(both / "base.safetensors", [tmp_path / "unet_only.safetensors"], keep=["alphas_cumprod"])
    actions = {n: plan.by_name[n].action for n in ("first_stage_model.quant_conv.bias", SD1)}
    assert set(actions.values()) == {"copy"}
    assert "has no text encoder (cond_stage_model.*)" in plan.by_name[SD1].reason
    assert plan.recipe.method == "task_arithmetic"
    bias = plan.by_name["model.diffusion_model.out.2.bias"]
    assert bias.action == "merge"
    assert bias.reason.endswith("weighted sum of the deltas"), "not of a part that lacks"
    assert any("without the prefix 'model.diffusion_model.'" in n for n in map(str, plan.notes))


@pytest.mark.parametrize(("base", "expert"), [("base", "e1.safetensors"), ("base.safetensors", "e1")])
def test_both_layouts_together_are_refused_with_the_way_out(both: Path, base: str, expert: str) -> None:
    with pytest.raises(CheckpointError, match=r"Stable Diffusion 1 in the layout of its own tool.*from_single_file"):
        actmat.plan(both / base, [both / expert])


def test_another_model_is_refused(both: Path, tmp_path: Path) -> None:
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.ones(6, 2)}, tmp_path / "flux.safetensors")
    with pytest.raises(CheckpointError, match="Flux in the layout of its own tool"):
        actmat.plan(both / "base", [tmp_path / "flux.safetensors"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight", "SDXL"),
        ("model.diffusion_model.middle_block.1.transformer_blocks.9.attn1.to_q.weight", "SDXL"),
        ("model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight", "Stable Diffusion 3"),
        ("double_blocks.0.img_attn.qkv.weight", "Flux"),
        ("model.diffusion_model.blocks.0.cross_attn.norm_k.weight", "Wan"),
        ("down_blocks.0.attentions.0.proj_in.weight", None),
    ],
)
def test_single_files_are_known_by_one_name(name: str, kind: str | None) -> None:
    found = single_file_of([name])
    assert (found and found.kind) == kind
    assert resolve_layout({name: TensorSpec(name, (8, 8), "float32", "")}, None).family == kind


def test_flux_packs_its_projections_in_one_matrix() -> None:
    width, inner = 3072, 12288
    sizes = {"double_blocks.0.img_attn.qkv": 3 * width, "single_blocks.0.linear1": 3 * width + inner}
    tensors = {f"{name}.weight": torch.empty(rows, width, device="meta") for name, rows in sizes.items()}
    layout = resolve_layout(specs_of(tensors), None).tensors["single_blocks.0.linear1.weight"]
    assert layout.role is Role.FUSED_LINEAR
    blocks = [(b.name, b.stop - b.start) for b in layout.blocks]
    assert blocks == [("q", width), ("k", width), ("v", width), ("mlp", inner)]


@pytest.mark.parametrize(("kind", "blocks"), [("Stable Diffusion 1", 4), ("SDXL", 3)])
def test_the_original_names_of_a_unet_are_those_that_diffusers_reads(kind: str, blocks: int) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    names = [n for a in ARCHITECTURES if a.name == kind for n in a.originals if not n.startswith("label_emb")]
    ends = ("weight", "bias")
    stored = {f"model.diffusion_model.{n}.{end}": torch.tensor(k) for k, n in enumerate(names) for end in ends}
    levels = ["x"] * blocks
    config = {"layers_per_block": 2, "down_block_types": levels, "up_block_types": levels}
    converted = convert_ldm_unet_checkpoint(stored, config)
    read = {n.removesuffix(".weight"): names[int(t)] for n, t in converted.items() if n.endswith(".weight")}
    assert read == {unet_paths()[n]: n for n in names}


def test_text_encoders_of_open_clip_get_the_rows_that_transformers_has_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, own = "conditioner.embedders.1.model.transformer.resblocks.0.", "lora_te2_text_model_encoder_layers_0_"
    base = {f"{layer}attn.in_proj_weight": torch.randn(24, 8), f"{layer}mlp.c_fc.weight": torch.randn(12, 8)}
    save_file(base, tmp_path / "base.safetensors")
    rows = {"self_attn_q_proj": (0, 8), "self_attn_v_proj": (16, 8), "mlp_fc1": (0, 12)}
    factors = {m: (torch.randn(n, 2), torch.randn(2, 8)) for m, (_, n) in rows.items()}
    sides = {"up": 0, "down": 1}
    stored = {f"{own}{m}.lora_{s}.weight": pair[k] for m, pair in factors.items() for s, k in sides.items()}
    save_file(stored | {f"{own}{m}.alpha": torch.tensor(4.0) for m in rows}, tmp_path / "lora.safetensors")
    report = actmat.merge(tmp_path / "base.safetensors", [tmp_path / "lora.safetensors"], out=tmp_path / "o", **QUICK)
    for module, (start, count) in rows.items():
        target = next(t for n, t in base.items() if ("mlp" in n) == ("mlp" in module))
        target[start : start + count] += 2 * factors[module][0] @ factors[module][1]
    for name, tensor in load_file(Path(report.out) / "model.safetensors").items():
        torch.testing.assert_close(tensor, base[name], rtol=1e-5, atol=1e-5)
