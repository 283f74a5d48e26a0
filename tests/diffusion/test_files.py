"""LoRA of image models as files: merged, converted, compared, with the metadata that still hold."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.located import open_expert
from tests.helpers.merging import actmat as command
from torch import Tensor

import actmat
from actmat.errors import MergeError, OutputError
from actmat.experts.locate import in_layout, open_handle
from actmat.extras.diffusion.metadata import distilled_warning, joint_metadata, kept_metadata
from actmat.extras.serving import serving_commands

WIDTH = 8
TRAINED = {"ss_base_model_version": "flux1", "ss_v2": "False", "sshs_model_hash": "12ab", "ss_network_dim": "2"}
RUN: dict[str, Any] = {"durable": False, "threads": 1, "compute_dtype": "float64"}
MODULES = {  # of the original code -> those of diffusers, and rows in columns
    "double_blocks.0.img_attn.qkv": ("transformer_blocks.0.attn", ("to_q", "to_k", "to_v"), (1, 1, 1)),
    "single_blocks.1.linear1": ("single_transformer_blocks.1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                                (1, 1, 1, 4)),
    "single_blocks.1.linear2": ("single_transformer_blocks.1", ("proj_out",), (1,)),
}  # fmt: skip


def lora(file: Path, seed: int, layout: str, metadata: dict[str, str] | None = None, skip: str = "") -> Path:
    """A LoRA of Flux, in names written out by hand."""
    rng, out = torch.Generator().manual_seed(seed), {}
    for name, (block, leaves, rows) in MODULES.items():
        a = torch.randn(2, WIDTH, generator=rng, dtype=torch.float64)
        bs = [torch.randn(n * WIDTH, 2, generator=rng, dtype=torch.float64) for n in rows]
        if name == skip:
            continue
        if layout == "diffusers":
            for leaf, b in zip(leaves, bs, strict=True):
                out |= {
                    f"transformer.{block}.{leaf}.lora_A.weight": a.clone(),
                    f"transformer.{block}.{leaf}.lora_B.weight": b,
                }
            continue
        stored = f"diffusion_model.{name}" if layout == "comfy" else f"lora_unet_{name.replace('.', '_')}"
        out |= {f"{stored}.lora_down.weight": a, f"{stored}.lora_up.weight": torch.cat(bs) * 2}
        out[f"{stored}.alpha"] = torch.tensor(1.0)
    save_file(out, file, metadata)
    return file


def deltas(file: Path) -> dict[str, Tensor]:
    """Deltas of a file in ComfyUI's or kohya's names, by ComfyUI's."""
    found, out = load_file(file), {}
    for name, a in found.items():
        if name.endswith(".lora_down.weight"):
            stem = name.removesuffix(".lora_down.weight")
            comfy = next((f"diffusion_model.{n}" for n in MODULES if n.replace(".", "_") in stem), stem)
            scale = float(found[f"{stem}.alpha"]) / a.shape[0]
            out[comfy] = scale * found[f"{stem}.lora_up.weight"].double() @ a.double()
    return out


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for seed, layout in enumerate(("kohya", "comfy", "diffusers"), 1):
        lora(tmp_path / f"{layout}.safetensors", seed, layout, TRAINED if layout != "comfy" else {"ss_v2": "False"})
    lora(tmp_path / "truth2.safetensors", 2, "kohya")
    lora(tmp_path / "truth3.safetensors", 3, "kohya")
    return tmp_path


def summed(place: Path, out: str, *experts: str, **fields: Any) -> Path:
    fields = {"method": "task_arithmetic", "options": {"scaling": 1.0}} | fields
    report = actmat.merge(None, [place / f"{e}.safetensors" for e in experts], out=place / out, **RUN, **fields)
    assert report.out == place / out
    return place / out


def test_files_without_strengths_add_up_at_strength_1(tmp_path: Path) -> None:
    """As loaders one after another add; what the evidence on language models prefers is not asked."""
    files = [lora(tmp_path / f"{seed}.safetensors", seed, layout) for seed, layout in ((1, "kohya"), (2, "comfy"))]
    report = actmat.merge(None, files, out=tmp_path / "sum.safetensors", **RUN)
    merged, parts = deltas(tmp_path / "sum.safetensors"), [deltas(file) for file in files]
    for name, delta in merged.items():
        torch.testing.assert_close(delta.double(), sum(part[name].double() for part in parts), rtol=1e-5, atol=1e-6)
    auto = [note.text for note in report.plan.notes if note.text.startswith("auto:")]
    assert len(auto) == 1
    assert "points over" not in auto[0]


@pytest.mark.parametrize("to", ["kohya", "comfy", None])
def test_files_of_all_layouts_merge_into_a_file(place: Path, to: str | None) -> None:
    """The sum of the deltas, each packed layer block by block; the first file's layout where none is named."""
    fields = {} if to is None else {"to": to}
    found = deltas(summed(place, "mix.safetensors", "kohya", "comfy", "diffusers", **fields))
    names = load_file(place / "mix.safetensors")
    start = "diffusion_model." if to == "comfy" else "lora_unet_"
    assert all(n.startswith(start) for n in names)
    parts = [deltas(place / f"{n}.safetensors") for n in ("kohya", "truth2", "truth3")]
    assert found.keys() == parts[0].keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, sum(p[name] for p in parts), rtol=1e-12, atol=1e-12)
    assert not [p.name for p in place.iterdir() if p.name.startswith(".mix") and "lock" not in p.name]


def test_image_models_are_not_told_to_run(place: Path) -> None:
    experts = [x for name in ("kohya", "comfy") for x in ("-e", f"{name}={place / name}.safetensors")]
    for words in (["merge", *experts, "--out", str(place / "folder")], ["diagnose", *experts]):
        said = command(words).out
        assert "ompare" in said
        assert "--data" not in said
    data = ["--data", "kohya=a cat", "--data", "comfy=a cat", "--out", str(place / "other")]
    assert "Image models are merged, but not run" in " ".join(command(["merge", *experts, *data]).err.split())
    summed(place, "mix.safetensors", "kohya", "comfy")
    assert "it is one file" in command(["verify", place / "mix.safetensors"]).err
    save_file({"model.diffusion_model.w": torch.zeros(2, 2)}, place / "base.safetensors")
    base = ["-b", str(place / "base.safetensors"), "-e", str(place / "base.safetensors")]
    assert "cannot be run" in command(["try", *base, "-m", "average", "--prompt", "a cat"]).err


def test_a_converted_adapter_opens_again_elsewhere(place: Path) -> None:
    """From its pickled handle, in the same layout, with the hashes of the file."""
    with open_expert(place / "diffusers.safetensors", None) as stored:
        expert = in_layout(stored, "comfy")
        assert expert.stored.hashes == stored.stored.hashes
        with open_handle(pickle.loads(pickle.dumps(expert.handle()))) as again:
            assert again.adapter.modules.keys() == {f"diffusion_model.{n}" for n in MODULES}
            for name, module in again.adapter.modules.items():
                one, two = (a.factors(a.modules[name], torch.float64) for a in (again.adapter, expert.adapter))
                assert torch.equal(one.b_OR, two.b_OR)
                assert torch.equal(one.a_RI, two.a_RI)
                assert module.shape[1] == WIDTH
    plan = actmat.plan(None, [place / "kohya.safetensors", place / "comfy.safetensors"])
    assert "expert 'comfy.safetensors': converted from the layout of comfy to kohya, as an adapter of Flux" in map(
        str, plan.notes
    )


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("layout", ["comfy", "kohya", "diffusers"])
def test_a_file_fits_bases_in_the_names_of_each_tool(layout: str, is_folder: bool, place: Path) -> None:
    truth = deltas(place / f"{ {'comfy': 'truth2', 'diffusers': 'truth3'}.get(layout, layout) }.safetensors")
    right = {f"model.{name}.weight": delta for name, delta in truth.items()}
    if is_folder:
        rows = [(f"diffusion_model.{name}", *parts) for name, parts in MODULES.items()]
        right = {
            f"{block}.{leaf}.weight": part
            for name, block, leaves, sizes in rows
            for leaf, part in zip(leaves, truth[name].split([n * WIDTH for n in sizes]), strict=True)
        }
    save_file({name: torch.zeros_like(delta) for name, delta in right.items()}, place / "flux.safetensors")
    options = {"method": "task_arithmetic", "options": {"scaling": 1.0}, **RUN}
    report = actmat.merge(place / "flux.safetensors", [place / f"{layout}.safetensors"], out=place / "o", **options)
    assert actmat.verify(place / "o").ok
    (file,) = (place / "o").glob("*.safetensors")
    torch.testing.assert_close(load_file(file), right, rtol=1e-12, atol=1e-12)
    is_own = layout == "comfy" if not is_folder else layout == "diffusers"
    converted = [note.text for note in report.plan.notes if "as an adapter of Flux" in note.text]
    assert len(converted) == (not is_own and not (layout == "kohya" and not is_folder))


def test_the_base_tells_which_model_a_file_is_of(place: Path) -> None:
    """Names of attention layers only, without metadata: Flux, Stable Diffusion 3 and Qwen-Image have them."""
    file = lora(place / "bare.safetensors", 3, "diffusers")
    name = "double_blocks.0.img_attn.qkv"
    save_file({f"{name}.weight": torch.zeros(3 * WIDTH, WIDTH, dtype=torch.float64)}, place / "flux.safetensors")
    fields = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "drop": "transformer.single*", **RUN}
    actmat.merge(place / "flux.safetensors", [file], out=place / "o.safetensors", **fields)
    right = deltas(place / "truth3.safetensors")[f"diffusion_model.{name}"]
    torch.testing.assert_close(load_file(place / "o.safetensors")[f"{name}.weight"], right, rtol=1e-12, atol=1e-12)
    experts = [place / f"{layout}.safetensors" for layout in ("kohya", "diffusers")]
    assert actmat.merge(place / "flux.safetensors", experts, to="kohya", out=place / "k.safetensors").out.is_file()


def test_weights_beside_a_lora_file_are_said(tmp_path: Path) -> None:
    """As the embeddings of a trigger word, which trainers save into the folder of their LoRA."""
    (tmp_path / "lora").mkdir()
    lora(tmp_path / "lora/pytorch_lora_weights.safetensors", 1, "diffusers")
    save_file({"clip_l": torch.ones(2, WIDTH)}, tmp_path / "lora/ink_emb.safetensors")
    notes = [note.text for note in actmat.plan(experts=[tmp_path / "lora"]).notes]
    assert any("beside its adapter that are not merged: 'ink_emb.safetensors'" in text for text in notes), notes


def test_a_file_says_what_it_was_made_of(place: Path) -> None:
    out = summed(place, "mix.safetensors", "kohya", "diffusers", rank=3)
    found = metadata_of(out)
    assert found["ss_base_model_version"] == "flux1"
    assert found["ss_network_dim"] == "3"
    assert not [k for k in found if k.startswith("sshs_")]
    made = json.loads(found["actmat"])
    assert made["recipe"]["method"] == "task_arithmetic"
    assert [e["name"] for e in made["experts"]] == ["kohya.safetensors", "diffusers.safetensors"]
    assert all(len(e["content"]) > 10 for e in made["experts"])
    assert "ss_base_model_version" not in metadata_of(summed(place, "other.safetensors", "kohya", "comfy"))


def test_titles_trigger_words_and_hashes_of_the_parts_stay(tmp_path: Path) -> None:
    tags = [{"10_ink": {"inkstyle": 20, "1girl": 2}}, {"10_ink": {"1girl": 3}, "5_oil": {"oil": 7, "bad": "x"}}]
    extra = [{"modelspec.title": f"T{k}", "modelspec.trigger_phrase": f"word{k}", "ss_tag_frequency": json.dumps(t),
              "sshs_model_hash": f"{k}f"} for k, t in enumerate(tags)]  # fmt: skip
    files = [lora(tmp_path / f"{k}.safetensors", k, "kohya", TRAINED | more) for k, more in enumerate(extra)]
    out = tmp_path / "mix.safetensors"
    actmat.merge(None, files, out=out, **RUN)
    found = metadata_of(out)
    assert (found["modelspec.title"], found["modelspec.trigger_phrase"]) == ("T0 + T1", "word0, word1")
    assert json.loads(found["ss_tag_frequency"]) == {"10_ink": {"inkstyle": 20, "1girl": 5}, "5_oil": {"oil": 7}}
    assert [e["hashes"] for e in json.loads(found["actmat"])["experts"]] == [{"sshs_model_hash": f"{k}f"} for k in "01"]
    names = {f"model.diffusion_model.{n}.weight": sum(rows) for n, (_, _, rows) in MODULES.items()}
    save_file({n: torch.zeros(k * WIDTH, WIDTH).double() for n, k in names.items()}, tmp_path / "base.safetensors")
    actmat.merge(tmp_path / "base.safetensors", files, out=tmp_path / "baked.safetensors", **RUN)
    assert metadata_of(tmp_path / "baked.safetensors")["ss_tag_frequency"] == found["ss_tag_frequency"]


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"a": 3, "b": [1]}', '{"a": {"t": 1e9, "u": -1, "v": ' + "9" * 5000 + "}}", " " * (1 << 23)],
)
def test_hostile_headers_have_no_tags(text: str) -> None:
    hostile = {"ss_tag_frequency": text, "actmat": text, "modelspec.title": "t" * 10_000}
    assert joint_metadata([hostile, hostile]) == {}


def test_only_files_of_ours_are_replaced(place: Path) -> None:
    out = summed(place, "mix.safetensors", "kohya", "comfy")
    before = out.read_bytes()
    with pytest.raises(OutputError, match="exists; choose another path or pass --overwrite"):
        summed(place, "mix.safetensors", "kohya", "comfy")
    summed(place, "mix.safetensors", "kohya", "comfy", overwrite=True, rank=1)
    assert out.read_bytes() != before
    with pytest.raises(OutputError, match="was not written by actmat"):
        summed(place, "diffusers.safetensors", "kohya", "comfy", overwrite=True)
    with pytest.raises(OutputError, match="is an input of this merge"):
        summed(place, "mix.safetensors", "kohya", "mix", overwrite=True)
    with pytest.raises(OutputError, match="a report needs a folder"):
        summed(place, "new.safetensors", "kohya", "comfy", diagnose=True)


def test_a_failed_merge_leaves_no_file(place: Path) -> None:
    bad = load_file(place / "comfy.safetensors")
    next(iter(bad.values())).fill_(float("nan"))
    save_file(bad, place / "comfy.safetensors")
    with pytest.raises(MergeError):
        summed(place, "mix.safetensors", "kohya", "comfy")
    assert not (place / "mix.safetensors").exists()


def test_what_is_a_folder_is_not_named_as_a_file(place: Path) -> None:
    from tests.helpers.adapters import LLAMA, save_adapter

    for seed in (1, 2):
        save_adapter(place / f"peft{seed}", "llama", seed, **LLAMA)
    experts = [place / "peft1", place / "peft2"]
    for name in ("x.safetensors", "x.gguf", "x.ckpt", "X.SAFETENSORS"):
        with pytest.raises(MergeError, match=f"{name} would be a folder: one file .* is made of LoRA files"):
            actmat.merge(None, experts, out=place / name, **RUN)
        assert not (place / name).exists()
    with pytest.raises(MergeError, match="found nothing there") as caught:
        actmat.merge(None, [*experts, place / "missing"], out=place / "x.safetensors", **RUN)
    assert "would be a folder" not in str(caught.value)


@pytest.mark.parametrize("to", ["comfy", "kohya", "diffusers"])
def test_a_file_is_converted_exactly(place: Path, to: str) -> None:
    """There and back, deltas are the same; metadata stay, hashes and what factors now include go."""
    actmat.export(place / "kohya.safetensors", out=place / "out.safetensors", to=to)
    if to == "diffusers":
        assert "transformer.single_transformer_blocks.1.proj_mlp.lora_A.weight" in load_file(place / "out.safetensors")
    actmat.export(place / "out.safetensors", out=place / "back.safetensors", to="kohya")
    found, expected = deltas(place / "back.safetensors"), deltas(place / "kohya.safetensors")
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    kept = metadata_of(place / "out.safetensors")
    assert kept == {**{k: v for k, v in TRAINED.items() if k != "sshs_model_hash"}, "format": "pt",
                    "ss_network_module": "networks.lora"}  # fmt: skip
    with pytest.raises(OutputError, match="exists"):
        actmat.export(place / "kohya.safetensors", out=place / "out.safetensors", to=to)


def test_what_a_converted_file_cannot_hold_is_said_or_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from tests.helpers.lora_files import tiny_unet

    model = get_peft_model(tiny_unet(), LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["conv_out"]))
    model.save_pretrained(tmp_path / "full")
    with pytest.raises(MergeError, match="linear layers and convolutions, not 'conv_out"):
        actmat.export(tmp_path / "full", out=tmp_path / "full.safetensors", to="diffusers")
    get_peft_model(tiny_unet(), LoraConfig(r=2, target_modules=["to_q"])).save_pretrained(tmp_path / "lora")
    (tmp_path / "lora" / "embeddings.safetensors").write_bytes(b"any")
    said = actmat.export(tmp_path / "lora", out=tmp_path / "lora.safetensors", to="diffusers")
    assert "warning: expert 'adapter' has weights beside its adapter that are not merged: 'embeddings" in said


def test_how_a_file_is_loaded(place: Path) -> None:
    out = summed(place, "mix.safetensors", "kohya", "comfy")
    folder = summed(place, "mix", "kohya", "comfy")
    for location, name in ((out, "mix.safetensors"), (folder, "pytorch_lora_weights.safetensors")):
        found = serving_commands(str(location))
        assert found.python[-1] == f"pipe.load_lora_weights({str(location)!r})"
        assert any("ComfyUI/models/loras/" in n and name in n for n in found.notes)
        assert not found.vllm


@pytest.mark.parametrize(
    ("name", "metadata", "word"),
    [
        ("sdxl_lightning_4step_lora.safetensors", {}, "lightning"),
        ("Wan21-lightx2v-rank64.safetensors", {}, "lightx2v"),
        ("pytorch_lora_weights.safetensors", {"modelspec.title": "LCM for SDXL"}, "lcm"),
        ("Hyper-SDXL-8steps.safetensors", {}, "hyper-sdxl"),
        ("qwen_8steps.safetensors", {}, "8steps"),
        ("turbofan_style.safetensors", {}, ""),
        ("steps_of_stone.safetensors", {"ss_output_name": "delcmara"}, ""),
    ],
)
def test_distilled_adapters_are_named(name: str, metadata: dict[str, str], word: str) -> None:
    found = distilled_warning(f"/loras/{name}", metadata)
    assert [f"is called '{word}'," in n for n in found] == [True] * bool(word)


def test_a_plan_warns_of_a_distilled_adapter(place: Path) -> None:
    lora(place / "flux-turbo.safetensors", 4, "kohya")
    plan = actmat.plan(None, [place / "kohya.safetensors", place / "flux-turbo.safetensors"])
    assert [
        n for n in map(str, plan.notes) if n.startswith("warning: expert 'flux-turbo.safetensors': is called 'turbo'")
    ]


def test_metadata_of_unequal_ranks_say_so() -> None:
    from actmat.checkpoints.base import TensorSpec

    specs = {n: TensorSpec(n, (r, 2), "float32", "") for n, r in (("a.lora_down.weight", 2), ("b.lora_A.weight", 3))}
    found = kept_metadata([{"ss_v2": "x", "ss_network_alpha": "1", "modelspec.hash_sha256": "0"}], specs)
    assert found == {"format": "pt", "ss_v2": "x", "ss_network_module": "networks.lora", "ss_network_dim": "Dynamic"}
