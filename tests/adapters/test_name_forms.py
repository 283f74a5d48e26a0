"""Names of adapters' modules in all their forms: read in one, given to one part of the base, or refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import save_adapter, tiny
from tests.helpers.checkpoint_files import edit_config, save_folder, save_lora
from tests.helpers.located import open_expert
from tests.tolerances import F32_ELEMENTWISE, relative_error
from torch import Tensor

import actmat
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.errors import MergeError
from actmat.experts.lora.names import looks_like_factor
from actmat.extras.diffusion.architectures import ARCHITECTURES, COMFY_MODEL, ImageArchitecture
from actmat.extras.diffusion.layouts import convert_lora
from actmat.layout.in_memory import find_on_disk

RUN: dict[str, Any] = {"durable": False, "threads": 1}
KEY = "model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"

FORMS: dict[str, Callable[[str], str]] = {
    "language model of another": lambda n: n.replace("model.layers", "model.language_model.layers"),
    "before transformers 4.52": lambda n: n.replace("model.layers", "language_model.model.layers"),
    "without a head": lambda n: n.replace("model.model.layers", "model.layers"),
    "torch.compile": lambda n: n.replace("base_model.model.", "base_model.model._orig_mod."),
    "torch.compile of layers": lambda n: n.replace("self_attn", "_orig_mod.self_attn"),
    "DDP": lambda n: n.replace("base_model.model.", "base_model.model.module."),
    "DDP of all": lambda n: f"module.{n}",
    "FSDP": lambda n: n.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
    "checkpointing": lambda n: n.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
    "no prefix": lambda n: n.removeprefix("base_model.model."),
    "name of the adapter": lambda n: n.replace(".weight", ".style.weight"),
    "no weight": lambda n: n.removesuffix(".weight"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the tiny Llama."""
    place = tmp_path_factory.mktemp("forms")
    for seed, name in enumerate("ab"):
        save_adapter(place / name, "llama", seed, r=2, target_modules=["q_proj"])
    return place


def change(folder: Path) -> Tensor:
    """Change of a layer by PEFT."""
    merged = PeftModel.from_pretrained(tiny("llama"), folder).merge_and_unload()
    return (merged.state_dict()[f"{KEY}.weight"] - tiny("llama").state_dict()[f"{KEY}.weight"]).detach()


def in_form(pair: Path, folder: Path, form: Callable[[str], str]) -> Path:
    """The second adapter with other names."""
    shutil.copytree(pair / "b", folder)
    save_file({form(n): t for n, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_two_forms_of_names_are_one_adapter(form: str, is_first: bool, pair: Path, tmp_path: Path) -> None:
    other = in_form(pair, tmp_path / "b", FORMS[form])
    experts = [other, pair / "a"] if is_first else [pair / "a", other]
    actmat.merge(None, experts, out=tmp_path / "out", method="average", scope="all", **RUN)
    expected = (change(pair / "a") + change(pair / "b")) / 2
    assert len(load_file(tmp_path / "out" / WEIGHTS)) == 4
    assert relative_error(change(tmp_path / "out"), expected) < F32_ELEMENTWISE


@pytest.mark.parametrize("form", ["torch.compile of layers", "no prefix", "no weight", "DDP of all"])
def test_an_output_has_the_names_that_peft_loads(form: str, pair: Path, tmp_path: Path) -> None:
    other = in_form(pair, tmp_path / "b", FORMS[form])
    actmat.merge(None, [other], out=tmp_path / "out", method="average", scope="all", **RUN)
    assert relative_error(change(tmp_path / "out"), change(pair / "b")) < F32_ELEMENTWISE


def with_class(folder: Path, name: str | None, task: str | None = None) -> None:
    """Another class in the config."""
    mapping = {"base_model_class": name} if name else None
    edit_config(folder, auto_mapping=mapping, task_type=task)


def test_names_that_no_config_decides_are_refused(pair: Path, tmp_path: Path) -> None:
    one = shutil.copytree(pair / "a", tmp_path / "a")
    two = in_form(pair, tmp_path / "b", FORMS["language model of another"])
    for folder in (one, two):
        with_class(folder, None, "CAUSAL_LM")  # as trainers write for models with vision, too
    with pytest.raises(MergeError, match=r"'model.layers' in a, 'model.language_model.layers' in b"):
        actmat.merge(None, [one, two], out=tmp_path / "out", method="average", **RUN)
    for folder, name in ((one, "CLIPTextModel"), (two, "CLIPVisionModel")):
        with_class(folder, name)
    with pytest.raises(MergeError, match="different classes of models: CLIPTextModel"):
        actmat.merge(None, [one, two], out=tmp_path / "out", method="average", **RUN)
    assert not (tmp_path / "out").exists()


def test_a_part_by_itself_and_in_the_whole_is_refused(pair: Path, tmp_path: Path) -> None:
    for folder in "ab":
        shutil.copytree(pair / folder, tmp_path / folder)
    for folder, start in (("a", "encoder."), ("b", "vision_model.encoder.")):
        file = tmp_path / folder / WEIGHTS
        save_file({n.replace("model.layers", f"{start}layers"): t for n, t in load_file(file).items()}, file)
        with_class(tmp_path / folder, None)
    with pytest.raises(MergeError, match=r"'encoder.layers' in a, 'vision_model.encoder.layers' in b|name the same"):
        actmat.merge(None, [tmp_path / "a", tmp_path / "b"], out=tmp_path / "out", method="average", **RUN)


TOWERS = [
    ("CLIPVisionModel", "vision_model.", "text_model."),
    ("CLIPTextModelWithProjection", "text_model.", "vision_model."),
    ("SiglipVisionModel", "vision_model.", "text_model."),
    ("BartEncoder", "model.encoder.", "model.decoder."),
    ("BartDecoder", "model.decoder.", "model.encoder."),
    ("Qwen2_5OmniThinkerForConditionalGeneration", "thinker.", "talker."),
    ("Qwen2_5OmniTalkerForConditionalGeneration", "talker.", "thinker."),
    ("ClapAudioModel", "audio_model.", "text_model."),
]
"""Class of a part, its prefix, the prefix of another part with the same names."""


def tower_adapter(folder: Path, name: str | None, kind: str, width: int = 4) -> Path:
    """An adapter without the prefix of its part."""
    torch.manual_seed(0)
    modules = {f"layers.{i}.fc1": (torch.randn(2, width), torch.randn(6, 2)) for i in range(2)}
    save_lora(folder, modules, target_modules=["fc1"], auto_mapping={"base_model_class": name} if name else None)
    if kind == "IA3":
        save_file({f"base_model.model.{n}.ia3_l": 1 + torch.rand(6, 1) for n in modules}, folder / WEIGHTS)
        edit_config(folder, peft_type="IA3", feedforward_modules=[])
    return folder


def whole_model(*prefixes: str, widths: tuple[int, int] = (4, 4)) -> Model:
    """A base of several parts with the same names."""
    parts = zip(prefixes, widths, strict=True)
    return hold_model({f"{p}layers.{i}.fc1.weight": torch.ones(6, w) for p, w in parts for i in range(2)})


@pytest.mark.parametrize("kind", ["LORA", "IA3"])
@pytest.mark.parametrize(("name", "own", "other"), TOWERS)
def test_a_name_that_two_parts_complete_is_of_the_class(
    name: str, own: str, other: str, kind: str, tmp_path: Path
) -> None:
    adapter, base = tower_adapter(tmp_path / "a", name, kind), whole_model(own, other)
    with open_expert(adapter, base) as expert:
        assert {n for n in base.specs if expert.source(n).kind == "formed"} == {
            n for n in base.specs if n.startswith(own)
        }
    for unknown in (None, "Whole"):
        nameless = tower_adapter(tmp_path / f"{unknown}", unknown, kind)
        with pytest.raises(MergeError) as error:
            open_expert(nameless, base)
        assert all(f"'{p}'" in str(error.value) for p in (own, other))
        assert len(error.value.problems) == 1


def test_shapes_decide_between_parts(tmp_path: Path) -> None:
    adapter, base = tower_adapter(tmp_path / "a", None, "LORA", 8), whole_model("a_model.", "b_model.", widths=(4, 8))
    with open_expert(adapter, base) as expert:
        changed = [n for n in base.specs if expert.source(n).kind == "formed"]
    assert changed == ["b_model.layers.0.fc1.weight", "b_model.layers.1.fc1.weight"]
    with pytest.raises(MergeError, match="does not fit"):
        open_expert(tower_adapter(tmp_path / "b", None, "LORA", 3), base)
    found, _ = find_on_disk(base, [["layers.0.fc1.weight"]], part="b_model")
    assert found["layers.0.fc1.weight"].slices[0].name == "b_model.layers.0.fc1.weight"


def test_a_full_expert_of_one_part(tmp_path: Path) -> None:
    base = whole_model("text_model.", "vision_model.")
    expert = {n.removeprefix("text_model."): base.tensors.read(n) * 2 for n in base.specs if n.startswith("text")}
    save_folder(tmp_path / "base", {n: base.tensors.read(n) for n in base.specs})
    save_folder(tmp_path / "part", expert)
    kept: dict[str, Any] = {"method": "average", "keep": ["vision_model.*"], "scope": "all"}
    with pytest.raises(MergeError, match="completed by several parts"):
        actmat.merge(tmp_path / "base", [tmp_path / "part"], out=tmp_path / "out", **kept, **RUN)
    save_folder(tmp_path / "part", expert, {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"})
    actmat.merge(tmp_path / "base", [tmp_path / "part"], out=tmp_path / "out", **kept, **RUN)
    out = load_file(tmp_path / "out/model.safetensors")
    assert {n for n, t in out.items() if t.max() == 2} == {n for n in out if n.startswith("text_model.")}


def test_weights_twice_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """As trainers store a moving average beside the weights."""
    base = {"layers.0.fc1.weight": torch.ones(2, 2), "layers.1.fc1.weight": torch.ones(2, 2)}
    save_folder(tmp_path / "base", base)
    save_folder(tmp_path / "e", {f"{p}.{n}": t * k for k, p in ((2, "model"), (3, "ema")) for n, t in base.items()})
    fields: dict[str, Any] = {"method": "average", "scope": "all", "out": tmp_path / "out", **RUN}
    with pytest.raises(MergeError, match=r"moving average beside the weights.*--drop 'ema\.\*'"):
        actmat.merge(tmp_path / "base", [tmp_path / "e"], **fields)
    actmat.merge(tmp_path / "base", [tmp_path / "e"], drop="ema.*", **fields)
    assert all(t.eq(2).all() for t in load_file(tmp_path / "out/model.safetensors").values())


PEFT_TUNERS = (
    *("lora_A", "lora_embedding_A", "lora_magnitude_vector", "hada_w1_a", "lokr_w1", "oft_R", "boft_R", "ia3_l"),
    *("vera_lambda_b", "vblora_vector_bank", "randlora_lambda", "fourierft_spectrum", "hra_u", "c3a_kernel"),
    *("road_theta", "delora_A", "waveft_spectrum", "gralora_A", "shira_weight", "ln_tuning_layers", "miss_block"),
    *("poly_lora_A", "trainable_tokens_delta", "tinylora_v", "unilora_theta", "lora_E"),
)
UNREAD = {
    "MLX": ("model.layers.0.q_proj.lora_a", "model.layers.0.q_proj.lora_b"),
    "torchtune": ("layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"),
    "XLabs": ("double_blocks.0.processor.qkv_lora1.down.weight", "double_blocks.0.processor.qkv_lora1.up.weight"),
    "GLoRA": tuple(f"lora_unet_mid_block_fc.{side}.weight" for side in ("a1", "a2", "b1", "b2")),
    "GLoRA with dots": tuple(f"diffusion_model.fc.{side}.weight" for side in ("a1", "a2", "b1", "b2")),
    "two adapters": tuple(f"fc.lora_{side}.{name}.weight" for side in "AB" for name in ("x", "y")),
    "no underscore": ("fc.loraA.weight", "fc.loraB.weight"),
} | {f"PEFT's {name}": (f"fc.{name}",) for name in PEFT_TUNERS}
"""Names of factors that are not read from a file without a config."""


def make_files(folder: Path, names: tuple[str, ...], *, is_folder: bool) -> list[Path]:
    """Two files of factors, or two folders of a model that holds them."""
    out = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tensors = {n: torch.randn(4, 4) for n in names}
        out.append(folder / (f"{seed}" if is_folder else f"{seed}.safetensors"))
        if is_folder:
            save_folder(out[-1], tensors | {"norm.weight": torch.ones(4)}, {"model_type": "llama"})
        else:
            save_file(tensors, out[-1])
    return out


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("kind", UNREAD)
def test_what_looks_like_factors_is_never_averaged(kind: str, is_folder: bool, tmp_path: Path) -> None:
    experts = make_files(tmp_path, UNREAD[kind], is_folder=is_folder)
    with pytest.raises(MergeError) as error:
        actmat.merge(None, experts, out=tmp_path / "out", **RUN)
    assert error.value.exit_code == 1
    assert "1" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_weights_of_architectures_are_not_factors() -> None:
    names = ["att.w_lora.lora.0.weight", "self_attn.q_a_proj.weight", "kv_a_proj_with_mqa.weight", "explore_a.weight"]
    assert not any(map(looks_like_factor, [*names, *tiny("deepseek_v3").state_dict(), *tiny("qwen3_moe").state_dict()]))


@pytest.mark.parametrize("end", [".style.weight", ".default_0.weight", ".default_0", ".default.weight", ""])
def test_factors_with_other_ends_are_products(end: str, tmp_path: Path) -> None:
    place = "transformer.transformer_blocks.0.attn.to_q.lora_"
    for seed in (1, 2):
        torch.manual_seed(seed)
        a, b = torch.randn(2, 8), torch.randn(8, 2)
        save_file({f"{place}A{end}": a, f"{place}B{end}": b}, tmp_path / f"{seed}.safetensors")
        save_file({f"{place}A.weight": a, f"{place}B.weight": b}, tmp_path / f"plain{seed}.safetensors")
    for start in ("", "plain"):
        experts = [tmp_path / f"{start}{seed}.safetensors" for seed in (1, 2)]
        actmat.merge(None, experts, out=tmp_path / f"{start}.safetensors", method="average", scope="all", **RUN)
    one, two = (load_file(tmp_path / f"{start}.safetensors") for start in ("", "plain"))
    assert one.keys() == two.keys()
    assert all(torch.equal(t, two[n]) for n, t in one.items())


ATTENTION = "input_blocks.4.1.transformer_blocks.0.attn2.to_k"
IMAGE_MODELS = {
    "Stable Diffusion 1": (768, ATTENTION),
    "Stable Diffusion 2": (1024, ATTENTION),
    "SDXL": (2048, ATTENTION),
    "Flux": (3072, "double_blocks.0.img_attn.qkv"),
    "Stable Diffusion 3": (1536, "joint_blocks.0.x_block.attn.qkv"),
    "Wan": (5120, "blocks.0.self_attn.q"),
    "Qwen-Image": (3072, "transformer_blocks.0.img_mod.1"),
}
"""Inputs of a module, and its original name."""


def image_lora(file: Path, of: ImageArchitecture, layout: str) -> Path:
    """A LoRA of one module in the names of a layout."""
    width, original = IMAGE_MODELS[of.name]
    name = {
        "kohya": f"lora_unet_{original}".replace(".", "_"),
        "comfy": COMFY_MODEL + original,
        "diffusers": f"{of.component}.{of.originals[original].paths[0]}",
    }[layout]
    rows = 1 if layout == "diffusers" else len(of.originals[original].paths)
    ends = ("lora_down", "lora_up") if layout == "kohya" else ("lora_A", "lora_B")
    tensors = {
        f"{name}.{ends[0]}.weight": torch.randn(1, width),
        f"{name}.{ends[1]}.weight": torch.randn(rows * width, 1),
    }
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("layout", ["kohya", "comfy", "diffusers"])
@pytest.mark.parametrize("one", ARCHITECTURES, ids=lambda a: a.name)
def test_adapters_of_two_architectures_are_refused(one: ImageArchitecture, layout: str, tmp_path: Path) -> None:
    first = image_lora(tmp_path / "first.safetensors", one, layout)
    for k, two in enumerate(ARCHITECTURES):
        second = image_lora(tmp_path / f"{k}.safetensors", two, "kohya" if layout == "comfy" else layout)
        alike = {one.name, two.name} == {"Flux", "Qwen-Image"} and layout == "diffusers"  # in this module
        if one is two or alike:
            actmat.plan(None, [first, second])
            continue
        with pytest.raises(MergeError, match=r"different model architectures|has deltas of shapes"):
            actmat.plan(None, [first, second])


def test_text_encoders_of_two_architectures_are_refused(tmp_path: Path) -> None:
    """By kohya's prefix: `lora_te_` of Stable Diffusion 1 and 2, `lora_te1_` of those with several encoders."""
    for k, prefix in enumerate(("lora_te_", "lora_te1_", "lora_te2_")):
        flat = f"{prefix}text_model_encoder_layers_0_mlp_fc1"
        pair = {f"{flat}.lora_down.weight": torch.ones(1, 768), f"{flat}.lora_up.weight": torch.ones(3072, 1)}
        save_file(pair, tmp_path / f"{k}.safetensors")
    one, *others = (tmp_path / f"{k}.safetensors" for k in range(3))
    actmat.plan(None, others)
    for other in others:
        with pytest.raises(MergeError, match="different model architectures"):
            actmat.plan(None, [one, other])


def test_metadata_that_name_another_model(tmp_path: Path) -> None:
    tensors = load_file(image_lora(tmp_path / "flux.safetensors", ARCHITECTURES[3], "kohya"))
    for said in ("flux-2-dev/lora", "FLUX.2-klein", "hunyuan-video", "lumina-2"):
        save_file(tensors, tmp_path / "other.safetensors", {"modelspec.architecture": said})
        with pytest.raises(MergeError, match="different model architectures"):
            actmat.plan(None, [tmp_path / "flux.safetensors", tmp_path / "other.safetensors"])
        actmat.plan(None, [tmp_path / "other.safetensors"])
        with pytest.raises(MergeError, match="its metadata or shapes are of the model"):
            convert_lora(tensors, "diffusers", {"modelspec.architecture": said})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("single_blocks.0.linear2", (16, 64)),
        ("single_blocks.0.linear1", (144, 16)),
        ("double_blocks.0.img_mlp.2", (16, 48)),
    ],
)
def test_shapes_of_flux_2(name: str, shape: tuple[int, int]) -> None:
    tensors = {f"diffusion_model.{name}.lora_A.weight": torch.randn(2, shape[1])}
    tensors |= {f"diffusion_model.{name}.lora_B.weight": torch.randn(shape[0], 2)}
    with pytest.raises(MergeError, match="of the model 'flux2'"):
        convert_lora(tensors, "diffusers")
