"""Single files of image tools: merged as they are, and with experts in the layout of diffusers, both ways."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.diffusion import moved, pipeline, single_file
from tests.helpers.located import open_expert
from tests.helpers.models import stored
from tests.helpers.tinymodels import specs_of

import actmat
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.rows import RowRange, RowsCheckpoint, TensorRows, numbered_rows, ranges_of
from actmat.errors import CheckpointError
from actmat.experts.locate import open_handle
from actmat.extras.diffusion.expert import _folder_rows
from actmat.layout import Role, resolve_layout
from actmat.layout.components import single_file_of

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


@pytest.mark.parametrize(
    "kinds", [("base", ".safetensors"), ("base.safetensors", "")], ids=["into_folder", "into_file"]
)
def test_experts_in_the_other_layout_are_read_in_the_bases(both: Path, tmp_path: Path, kinds: tuple[str, str]) -> None:
    base, suffix = kinds
    mixed = actmat.merge(
        both / base,
        [both / f"e1{suffix}", both / f"e2{suffix}"],
        out=tmp_path / "mixed",
        keep=["alphas_cumprod"] if suffix == "" else [],
        **QUICK,
    )
    other = "" if suffix else ".safetensors"
    alike = actmat.merge(both / base, [both / f"e1{other}", both / f"e2{other}"], out=tmp_path / "alike", **QUICK)
    with open_checkpoint(mixed.out) as one, open_checkpoint(alike.out) as two:
        assert one.specs.keys() == two.specs.keys()
        different = [n for n in one.specs if not torch.equal(one.read(n), two.read(n))]
    assert different in ([], ["alphas_cumprod"])
    assert {i.name for i in mixed.plan.items if i.action == "copy"} <= {"alphas_cumprod"} | {
        n for n in mixed.plan.by_name if n.endswith("position_ids")
    }
    assert actmat.verify(mixed.out).ok


def test_a_converted_expert_opens_again_from_its_handle(both: Path) -> None:
    with open_checkpoint(both / "base") as base, open_expert(both / "e1.safetensors", base) as expert:
        with open_handle(expert.handle()) as again:
            name = "vae.encoder.mid_block.attentions.0.to_q.weight"
            assert torch.equal(again.read(name), stored(both / "e1" / "vae")[name.removeprefix("vae.")])
            assert again.specs == expert.specs
        part = bytearray(100)
        expert.read_into("unet.conv_in.weight", 40, memoryview(part))
        whole = stored(both / "e1" / "unet")["conv_in.weight"].numpy().tobytes()
        assert bytes(part) == whole[40:140]


def test_what_has_no_counterpart_is_copied_with_the_reason(both: Path) -> None:
    plan = actmat.plan(both / "base.safetensors", [both / "e1"])
    item = plan.by_name["alphas_cumprod"]
    assert item.action == "copy"
    assert item.reason == "without a counterpart in the diffusers folder, expert 'e1': copied from the base"


def test_another_model_is_refused(both: Path, tmp_path: Path) -> None:
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.ones(6, 2)}, tmp_path / "flux.safetensors")
    with pytest.raises(CheckpointError, match="diffusers cannot convert any of its tensors"):
        actmat.plan(both / "base", [tmp_path / "flux.safetensors"])


def test_flux_packs_its_projections_in_one_file() -> None:
    """At the real width, which diffusers' map expects; of one block of each kind, headers only."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    width, inner = 3072, 12288
    shapes: dict[str, tuple[int, ...]] = {"img_in.weight": (width, 64), "txt_in.weight": (width, 4096)}
    for name, size in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        shapes |= {f"{name}.in_layer.weight": (width, size), f"{name}.out_layer.weight": (width, width)}
    for side in ("img", "txt"):
        block = f"double_blocks.0.{side}"
        shapes |= {f"{block}_mod.lin.weight": (6 * width, width), f"{block}_attn.qkv.weight": (3 * width, width)}
        shapes |= {f"{block}_attn.proj.weight": (width, width), f"{block}_mlp.0.weight": (inner, width)}
        shapes |= {f"{block}_mlp.2.weight": (width, inner)}
    single = "single_blocks.0"
    shapes |= {
        f"{single}.linear1.weight": (3 * width + inner, width),
        f"{single}.linear2.weight": (width, width + inner),
    }
    shapes |= {f"{single}.modulation.lin.weight": (3 * width, width), "final_layer.linear.weight": (64, width)}
    shapes |= {"final_layer.adaLN_modulation.1.weight": (2 * width, width)}
    shapes |= {n.removesuffix("weight") + "bias": s[:1] for n, s in shapes.items()}
    for side in ("img", "txt"):
        shapes |= {f"double_blocks.0.{side}_attn.norm.{k}_norm.scale": (128,) for k in ("query", "key")}
    shapes |= {f"{single}.norm.{k}_norm.scale": (128,) for k in ("query", "key")}
    specs = specs_of({n: torch.empty(s, device="meta") for n, s in shapes.items()})
    assert single_file_of(specs).kind == "Flux"  # type: ignore[union-attr]
    config = {"_class_name": "FluxTransformer2DModel"}
    folder = SimpleNamespace(specs=specs_of(dict(model.state_dict())), config=config, location="folder")
    rows = _folder_rows(SimpleNamespace(specs=specs, location="file"), folder)  # type: ignore[arg-type]
    missing = {n for n in folder.specs if n not in rows and "guidance" not in n}
    assert missing == set()
    qkv = "double_blocks.0.img_attn.qkv.weight"
    assert rows["transformer_blocks.0.attn.to_k.weight"].ranges == (RowRange(qkv, width, 2 * width),)
    packed = f"{single}.linear1.weight"
    mlp = RowRange(packed, 3 * width, 3 * width + inner)
    assert rows["single_transformer_blocks.0.proj_mlp.weight"].ranges == (mlp,)
    last = "final_layer.adaLN_modulation.1.weight"
    swapped = (RowRange(last, width, 2 * width), RowRange(last, 0, width))
    assert rows["norm_out.linear.weight"].ranges == swapped
    layout = resolve_layout(specs, None).tensors[packed]
    assert layout.role is Role.FUSED_LINEAR
    assert [(b.name, b.stop - b.start) for b in layout.blocks] == [
        ("q", width),
        ("k", width),
        ("v", width),
        ("mlp", inner),
    ]


def test_rows_of_other_tensors() -> None:
    tensors = {
        "qkv": torch.arange(12.0).reshape(6, 2),
        "turned": torch.arange(6.0).reshape(2, 3),
        "other": torch.ones(2),
    }
    rows = {
        "k": TensorRows((RowRange("qkv", 2, 4),)),
        "vq": TensorRows((RowRange("qkv", 4, 6), RowRange("qkv", 0, 2))),
        "t": TensorRows((RowRange("turned", 0, 2),), transposed=True),
    }
    with RowsCheckpoint(MemoryCheckpoint(tensors), {"k": (2, 2), "vq": (4, 2), "t": (3, 2)}, rows) as found:
        assert found.specs.keys() == {"k", "vq", "t", "other"}
        assert torch.equal(found.read("k"), tensors["qkv"][2:4])
        assert torch.equal(found.read("vq"), torch.cat([tensors["qkv"][4:], tensors["qkv"][:2]]))
        assert torch.equal(found.read("t"), tensors["turned"].T)
        assert torch.equal(found.read("other"), tensors["other"])
        part = bytearray(12)
        found.read_into("vq", 10, memoryview(part))
        assert bytes(part) == found.read("vq").numpy().tobytes()[10:22]
    standins, names, starts = numbered_rows(specs_of(tensors))
    joined = torch.cat([standins["turned"], standins["qkv"][:1]])
    assert ranges_of(joined, names, starts) == (RowRange("turned", 0, 2), RowRange("qkv", 0, 1))
