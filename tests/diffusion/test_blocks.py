"""Weights of blocks: the formulae of SuperMerger and LoRA Block Weight, by block, for every family and layout."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import actmat_command
from tests.tolerances import F64_IDENTITY, relative_error

import actmat
from actmat.errors import RecipeError
from actmat.extras.diffusion.architectures import ARCHITECTURES, ImageArchitecture
from actmat.extras.diffusion.blocks import block_weights
from actmat.planning.calls import NOWHERE, resolved
from actmat.recipe.values import read_value

SD, XL, FLUX = (next(a for a in ARCHITECTURES if a.name == n) for n in
                ("Stable Diffusion 1", "SDXL", "Flux"))  # fmt: skip
MODEL = "model.diffusion_model."
ENCODERS = ("cond_stage_model.transformer.text_model.encoder.layers.3.mlp.fc1.weight",
            "conditioner.embedders.1.model.transformer.resblocks.0.attn.out_proj.weight",
            "first_stage_model.decoder.mid.block_1.conv1.weight",
            "first_stage_model.encoder.down.0.block.0.conv1.bias")  # fmt: skip
INS, OUTS = ([f"{kind}{n:02}" for n in range(12)] for kind in ("IN", "OUT"))
LISTS = {
    12: ["BASE", "IN04", "IN05", "IN07", "IN08", "M00", *OUTS[:6]],
    17: ["BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "M00", *OUTS[3:]],
    20: ["BASE", *INS[:9], "M00", *OUTS[:9]],
    26: ["BASE", *INS, "M00", *OUTS],
    61: ["CLIP", "T5", "IN", *(f"D{n:02}" for n in range(19)), *(f"S{n:02}" for n in range(38)), "OUT"],
}
"""Lists of the tools: number of values -> their blocks."""


def block_in_supermerger(name: str, last: int) -> str:
    """Its rule for checkpoints: the time's and size's embeddings are of IN00, `out` of the last OUT, others of BASE."""
    numbered = re.search(r"\.(input|middle|output)_blocks?\.(\d+)\.", name)
    if numbered and numbered[1] != "middle":
        return f"{numbered[1].replace('put', '').upper()}{int(numbered[2]):02}"
    if numbered:
        return "M00"
    if "time_embed" in name or "label_emb" in name:
        return "IN00"
    return f"OUT{last:02}" if ".out." in name else "BASE"


def block_of_flux(name: str) -> str:
    """Its rule for Flux; that of LoRA Block Weight is the same on names with underscores."""
    for part, block in (("vae", "VAE"), ("t5xxl", "T5"), ("text_encoders.clip", "CLIP")):
        if part in name:
            return block
    numbered = re.search(r"(double|single)_blocks\.(\d+)\.", name)
    if numbered:
        return f"{numbered[1][0].upper()}{int(numbered[2]):02}"
    return "IN" if "_in" in name else "OUT"


def factors(text: str, names: list[str]) -> dict[str, float]:
    value = read_value(block_weights(text, names, 0.5)[0])
    return {name: resolved(value, name, NOWHERE) for name in names}


@pytest.mark.parametrize(
    ("architecture", "length", "last"), [(SD, 17, 11), (SD, 26, 11), (XL, 12, 8), (XL, 20, 8), (XL, 26, 8)]
)
def test_lists_of_unets_are_those_of_the_tools_for_every_tensor(
    architecture: ImageArchitecture, length: int, last: int
) -> None:
    values = dict(zip(LISTS[length], [round(0.9 - 0.07 * k, 2) for k in range(length)], strict=True))
    text = ",".join(map(str, values.values()))
    names = [f"{MODEL}{n}.weight" for n in architecture.originals] + list(ENCODERS)
    expected = {n: 0.5 * values.get(block_in_supermerger(n, last), 0.0) for n in names}
    assert len({*expected.values()}) > 10
    assert factors(text, names) == expected
    lacking = [name for name in LISTS[length] if name[-2:].isdigit() and int(name[-2:]) > last]
    assert block_weights(text, names)[1] == lacking, "a value of a block that the model lacks is named"
    by_module = {m: expected[f"{MODEL}{m}.weight"] for m in architecture.originals}
    check_other_names(architecture, text, by_module)


def test_the_list_of_flux_is_that_of_the_tools_for_every_tensor() -> None:
    values = dict(zip(LISTS[61], [round(1.5 - 0.05 * k, 2) for k in range(61)], strict=True)) | {"VAE": 0.0}
    text = ",".join(map(str, list(values.values())[:61]))
    names = [f"{MODEL}{n}.weight" for n in FLUX.originals]
    names += ["text_encoders.t5xxl.transformer.shared.weight", "vae.decoder.conv_in.weight",
              "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"]  # fmt: skip
    expected = {n: 0.5 * values[block_of_flux(n)] for n in names}
    assert factors(text, names) == expected
    check_other_names(FLUX, text, {m: expected[f"{MODEL}{m}.weight"] for m in FLUX.originals})


def check_other_names(architecture: ImageArchitecture, text: str, by_module: Mapping[str, float]) -> None:
    """The names of a model have the weights of its original names in every other layout."""
    layouts: list[Callable[[str], list[str]]] = [
        lambda m: [f"lora_unet_{m.replace('.', '_')}.lora_up.weight"],
        lambda m: [f"diffusion_model.{m}.lora_up.weight"],
        lambda m: [f"{architecture.component}.{p}.weight" for p in architecture.originals[m].paths],
        lambda m: [f"lora_unet_{p.replace('.', '_')}.alpha" for p in architecture.originals[m].paths],
    ]
    for names_of in layouts:
        expected = {name: value for module, value in by_module.items() for name in names_of(module)}
        assert factors(text, list(expected)) == expected


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        ({"model.diffusion_model.joint_blocks.3.x_block.attn.qkv.weight": "L03",
          "model.diffusion_model.x_embedder.proj.weight": "IN", "model.diffusion_model.final_layer.linear.bias": "OUT",
          "text_encoders.t5xxl.transformer.shared.weight": "BASE", "first_stage_model.conv_in.weight": "BASE"}, "sd3"),
        ({"transformer.transformer_blocks.3.attn.to_q.weight": "L03", "transformer.norm_out.linear.weight": "OUT",
          "transformer.transformer_blocks.30.attn.to_q.weight": "L30", "transformer.proj_out.weight": "OUT",
          "transformer.img_in.weight": "IN", "text_encoder.model.layers.3.mlp.up_proj.weight": "BASE"}, "qwen-image"),
        ({"lora_unet_transformer_blocks_3_img_mlp_net_2.alpha": "L03",
          "lora_unet_transformer_blocks_59_img_mlp_net_2.alpha": "L59"}, "qwen-image of kohya"),
        ({"diffusion_model.layers.3.attention.to_q.lora_A.weight": "L03",
          "diffusion_model.noise_refiner.3.attention.to_q.lora_A.weight": "IN",
          "diffusion_model.cap_embedder.1.lora_A.weight": "IN"}, "z-image"),
        ({"all_final_layer.2-1.linear.weight": "OUT", "layers.30.feed_forward.w1.weight": "L30",
          "context_refiner.0.attention.qkv.weight": "IN", "layers.3.attention.qkv.weight": "L03"}, "z-image alone"),
        ({"blocks.3.self_attn.q.weight": "L03", "head.head.weight": "OUT", "patch_embedding.weight": "IN"}, "wan"),
    ],
)  # fmt: skip
def test_named_blocks_of_transformers(names: dict[str, str], blocks: str) -> None:
    given = {"BASE": 0.1, "IN": 0.2, "L03": 0.3, "L30-59": 0.4, "OUT": 0.6}
    values = given | {"L30": 0.4, "L59": 0.4}
    text = ", ".join(f"{block.lower()} = {value}" for block, value in given.items())
    assert factors(text, list(names)) == {name: 0.5 * values[block] for name, block in names.items()}, blocks


def test_named_blocks_ranges_and_the_rest() -> None:
    names = [f"{MODEL}{b}.0.weight" for b in ("input_blocks.1", "input_blocks.9", "middle_block", "output_blocks.4")]
    assert list(factors("IN00-IN05=0.2, MID=0.5, OUT=-1", names).values()) == [0.1, 0.5, 0.25, -0.5]
    assert list(factors("IN=0.2, IN9=0.4, DEFAULT=0", names).values()) == [0.1, 0.2, 0.0, 0.0]
    assert block_weights("IN03=2, IN01=3, BASE=0", names)[1] == ["IN03", "BASE"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("IN12=1", r"found 'IN12'; this model has BASE, IN00-11, M00, OUT00-11"),
        ("D00=1", "found 'D00'"),
        ("in00-999999999=1", "found 'IN00-999999999'"),
        ("IN00=strong", "found 'strong', expected a number"),
        ("1,2,3", "found 3 values, expected 12, 17, 20, 26, 61"),
        (",".join(["nan"] * 26), "found 'nan'"),
        (",".join(["1"] * 61), "61 values are of CLIP T5 IN"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        block_weights(text, [f"{MODEL}input_blocks.9.0.weight"])
    with pytest.raises(RecipeError, match="expected a model with blocks"):
        block_weights("IN=1", ["model.layers.0.mlp.up_proj.weight"])


WEIGHTS = [round(0.05 * k, 2) for k in range(26)]


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints with a matrix, a kernel and a bias in every block of Stable Diffusion 1."""
    rng = torch.Generator().manual_seed(0)
    blocks = [f"input_blocks.{n}.0" for n in range(12)] + ["middle_block.1"]
    blocks += [f"output_blocks.{n}.0" for n in range(12)] + ["time_embed.0", "out.2"]
    shapes = {"weight": (6, 6), "conv.weight": (4, 4, 3, 3), "bias": (6,)}
    names = {f"{MODEL}{b}.{leaf}": shape for b in blocks for leaf, shape in shapes.items()}
    names |= dict.fromkeys(ENCODERS, (6, 6))
    files = folder / "a.safetensors", folder / "b.safetensors"
    for file in files:
        save_file({n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in names.items()}, file)
    return files


def test_checkpoints_are_merged_by_block(tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path)
    out, text = tmp_path / "o.safetensors", ",".join(map(str, WEIGHTS))
    flags = ["-b", first, "-e", second, "--set", "compute_dtype=float64", "--out", out]
    actmat_command("merge", *flags, "--blocks", text)
    values = dict(zip(LISTS[26], WEIGHTS, strict=True))
    a, b, found = load_file(first), load_file(second), load_file(out)
    held = actmat.merge(
        a, [b], options={"scaling": 1.0}, method="task_arithmetic", blocks=text, compute_dtype="float64"
    )
    for name, tensor in found.items():
        alpha = values[block_in_supermerger(name, 11)]
        assert relative_error(tensor, a[name] * (1 - alpha) + b[name] * alpha) < F64_IDENTITY, name
        assert relative_error(held.tensors[name], tensor) < F64_IDENTITY, name


def lora(folder: Path, name: str, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LoRA of some blocks of SDXL, and its deltas by module."""
    rng, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    for module in ("input_blocks_4_1_proj_in", "input_blocks_8_1_proj_in", "middle_block_1_proj_in",
                   "output_blocks_5_1_proj_in"):  # fmt: skip
        a, b = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((2, 6), (6, 2)))
        tensors |= {f"lora_unet_{module}.lora_down.weight": a, f"lora_unet_{module}.lora_up.weight": b,
                    f"lora_unet_{module}.alpha": torch.tensor(1.0)}  # fmt: skip
        deltas[f"lora_unet_{module}"] = 0.5 * b @ a
    save_file(tensors, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors", deltas


def test_lora_files_are_added_and_baked_by_block(tmp_path: Path) -> None:
    (ink, of_ink), (oil, of_oil) = (lora(tmp_path, name, seed) for seed, name in enumerate(("ink", "oil")))
    text = ",".join(map(str, WEIGHTS[:12]))
    values = dict(zip(LISTS[12], WEIGHTS[:12], strict=True))
    factor = dict(zip(of_ink, [values["IN04"], values["IN08"], values["M00"], values["OUT05"]], strict=True))
    experts = ["-e", ink, "-e", oil, "-w", "0.8", "-w", "-1", "--blocks", text, "--blocks", "MID=0.5"]
    precise = ["--set", "compute_dtype=float64", "--out", tmp_path / "o.safetensors"]
    actmat_command("merge", *experts, *precise)
    found = load_file(tmp_path / "o.safetensors")
    expected = {n: 0.8 * factor[n] * of_ink[n] - (0.5 if "middle" in n else 1) * of_oil[n] for n in of_ink}
    for name, delta in expected.items():
        a, b = found[f"{name}.lora_down.weight"], found[f"{name}.lora_up.weight"]
        scale = float(found[f"{name}.alpha"]) / a.shape[0]
        assert relative_error(scale * b @ a, delta) < F64_IDENTITY, name
    modules = {n: n.removeprefix("lora_unet_").replace("_proj_in", "").replace("_", ".") for n in of_ink}
    names = {n: f"{MODEL}{m.replace('.block', '_block')}.proj_in.weight" for n, m in modules.items()}
    base = {name: torch.randn(6, 6, dtype=torch.float64) for name in names.values()}
    save_file(base, tmp_path / "base.safetensors")
    actmat_command("merge", "-b", tmp_path / "base.safetensors", *experts, *precise, "--overwrite")
    baked = load_file(tmp_path / "o.safetensors")
    for name, delta in expected.items():
        assert relative_error(baked[names[name]], base[names[name]] + delta) < F64_IDENTITY, name
    refusal = actmat_command("merge", "-e", ink, "-e", oil, "--blocks", "MID=1", *precise, code=1)
    assert "Got 2 experts and 1 texts of blocks" in refusal
