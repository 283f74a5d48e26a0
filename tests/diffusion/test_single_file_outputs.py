"""Merges of single-file checkpoints: one file, its header metadata, and the marks by which loaders know a model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.diffusion.test_files import metadata_of
from tests.helpers.merging import actmat_command
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

import actmat
from actmat.errors import OutputError
from actmat.experts.locate import locate
from actmat.extras.diffusion.files import export_lora
from actmat.extras.diffusion.layouts import convert_lora
from actmat.planning.cost import factored_bytes

NAME = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
CONFIG = '{"transformer": {"num_layers": 1}}'


def saved(folder: Path, name: str, metadata: dict[str, str] | None = None, **marks: Tensor) -> Path:
    torch.manual_seed(len(name))
    path = folder / f"{name}.safetensors"
    save_file({NAME: torch.randn(8, 8), **marks}, path, metadata)
    return path


def test_one_file_is_written(tmp_path: Path) -> None:
    base, one, other = (saved(tmp_path, n, {"config": CONFIG}) for n in ("base", "one", "other"))
    before = {p.name for p in tmp_path.iterdir()}
    out = tmp_path / "out.safetensors"
    for overwrite in (False, True):
        report = actmat.merge(base, [one, other], out=out, method="average", max_shard_size="1KB", overwrite=overwrite)
        assert report.out == out
        assert {p.name for p in tmp_path.iterdir()} == before | {out.name}
    torch.testing.assert_close(load_file(out)[NAME], (load_file(one)[NAME] + load_file(other)[NAME]) / 2)
    found = metadata_of(out)
    assert found["config"] == CONFIG
    assert json.loads(found["actmat"])["recipe"]["method"] == "average"
    with pytest.raises(OutputError, match="exists"):
        actmat.merge(base, [one, other], out=out, method="average")
    with pytest.raises(OutputError, match="input"):
        actmat.merge(base, [one, other], out=base, method="average", overwrite=True)
    assert Path(str(actmat.merge(base, [one, other], out=tmp_path / "folder", method="average").out)).is_dir()


def test_strengths_of_one_expert_are_a_file_each(tmp_path: Path) -> None:
    base, one = (saved(tmp_path, n) for n in ("base", "one"))
    flags = ["-b", str(base), "-e", str(one), "--out", str(tmp_path / "o.safetensors")]
    plan = actmat_command("plan", *flags, "-w", "0.25,0.5,-1")
    for strength in (0.25, 0.5, -1):
        assert f"o-{strength}.safetensors" in plan
        assert f"weights {strength}\n" in plan
    merged = " ".join(actmat_command("merge", *flags, "-w", "0.25,0.5,-1").split())
    assert merged.count("recipe in the file's metadata") == 3
    assert {p.name for p in tmp_path.glob("o-*")} == {f"o-{s}.safetensors" for s in (0.25, 0.5, -1)}
    w0, w1 = (load_file(p)[NAME].double() for p in (base, one))
    for strength in (0.25, 0.5, -1):
        found = load_file(tmp_path / f"o-{strength}.safetensors")[NAME].double()
        torch.testing.assert_close(found, w0 + strength * (w1 - w0), atol=F32_ELEMENTWISE, rtol=F32_ELEMENTWISE)
    refusal = actmat_command("merge", *flags, "-e", f"two={one}", "-w", "0.25,0.5", "-w", "1", code=1)
    assert "a single expert; found 2" in refusal


@pytest.mark.parametrize(
    ("base", "one", "two", "kept", "noted"),
    [
        ({"config": "a"}, {"config": "a"}, {"config": "a"}, {"config": "a"}, ""),
        ({"config": "a"}, {"config": "b"}, {"config": "b"}, {"config": "b"}, "the experts' is written"),
        ({"config": "a"}, {"config": "b"}, {"config": "a"}, {"config": "a"}, "the base's is written"),
        ({}, {"modelspec.prediction_type": "v"}, {"modelspec.prediction_type": "v"},
         {"modelspec.prediction_type": "v"}, "prediction_type"),
        ({"modelspec.title": "a"}, {"modelspec.title": "b"}, {}, {}, ""),
        ({"license": "mit"}, {"license": "mit"}, {"license": "mit"}, {"license": "mit"}, ""),
        ({"license": "mit"}, {"license": "other"}, {"license": "mit"}, {}, "license"),
        ({"_quantization_metadata": "x"}, {"_quantization_metadata": "x"}, {"_quantization_metadata": "x"}, {}, ""),
        ({"format": "pt", "modelspec.hash_sha256": "0"}, {}, {}, {}, ""),
    ],
)  # fmt: skip
def test_header_metadata(
    tmp_path: Path, base: dict[str, str], one: dict[str, str], two: dict[str, str], kept: dict[str, str], noted: str
) -> None:
    files = [saved(tmp_path, n, md) for n, md in (("base", base), ("one", one), ("two", two))]
    plan = actmat.plan(files[0], files[1:], method="average")
    assert plan.metadata == kept
    found = [str(n) for n in plan.notes if "metadata" in str(n)]
    assert bool(found) == bool(noted)
    assert all(noted in text for text in found)


@pytest.mark.parametrize(
    ("one", "two", "written", "noted"),
    [
        (["v_pred", "ztsnr"], ["v_pred", "ztsnr"], ["v_pred", "ztsnr"], "alike"),
        (["v_pred"], [], [], "not written"),
        (["sigma"], ["sigma"], ["sigma"], "alike"),
        ([], [], [], ""),
    ],
)
def test_marks_of_all_experts_are_written(
    tmp_path: Path, one: list[str], two: list[str], written: list[str], noted: str
) -> None:
    marks = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([]), "sigma": torch.tensor(0.25)}
    base = saved(tmp_path, "base")
    files = [saved(tmp_path, n, None, **{k: marks[k] for k in own}) for n, own in (("one", one), ("two", two))]
    report = actmat.merge(base, files, out=tmp_path / "out", method="average")
    out = load_file(tmp_path / "out/model.safetensors")
    assert out.keys() == {NAME, *written}
    assert all(torch.equal(out[k], marks[k]) for k in written)
    assert any(noted in str(n) for n in report.plan.notes if "lacks" in str(n)) == bool(noted)
    assert actmat.verify(tmp_path / "out").ok


def test_exports_have_the_same_bytes(tmp_path: Path) -> None:
    k = "lora_unet_transformer_blocks_0_attn_to_q"
    tensors = {f"{k}.lora_down.weight": torch.randn(4, 16), f"{k}.lora_up.weight": torch.randn(16, 4)}
    metadata = {"modelspec.architecture": "qwen-image/lora", "ss_v2": "False", "ss_a": "1", "ss_b": "2"}
    save_file(tensors | {f"{k}.alpha": torch.tensor(4.0)}, tmp_path / "a.safetensors", metadata)
    outs = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for out in outs:
        with locate(tmp_path / "a.safetensors") as given:
            export_lora("comfy", given, out)
    assert len({out.read_bytes() for out in outs}) == 1
    assert len(load_file(outs[0])) == len(tensors) + 1


@pytest.mark.parametrize(("rank", "most"), [(16, 2**20), (2_000_000, 32 * 2**30)])
def test_memory_of_factors_is_bounded_by_their_sides(rank: int, most: int) -> None:
    assert factored_bytes((32, 32), 2 * rank) < most


@pytest.mark.parametrize(
    ("scale", "dtype", "vanished"), [(1e-160, "float32", 1), (1e-160, "float64", 0), (1, "float32", 0)]
)
def test_float64_deltas_that_vanish_are_counted(tmp_path: Path, scale: float, dtype: str, vanished: int) -> None:
    files = []
    for name, factor in (("base", 0.0), ("one", scale)):
        files.append(tmp_path / f"{name}.safetensors")
        save_file({NAME: torch.ones(8, 8, dtype=torch.float64) * factor}, files[-1])
    report = actmat.merge(files[0], files[1:], out=tmp_path / "out", method="linear", compute_dtype=dtype)
    assert report.totals.vanished == vanished


@pytest.mark.parametrize("prefix", ["lora_te2_", "lora_te3_"])
def test_t5_in_the_names_of_kohya_and_of_onetrainer(prefix: str) -> None:
    flat, path = "encoder_block_0_layer_0_SelfAttention_q", "encoder.block.0.layer.0.SelfAttention.q"
    a, b = torch.randn(4, 16), torch.randn(16, 4)
    file = {f"{prefix}{flat}.lora_down.weight": a, f"{prefix}{flat}.lora_up.weight": b}
    name = "lora_unet_double_blocks_0_img_attn_proj"
    file |= {f"{name}.lora_down.weight": torch.randn(4, 3072), f"{name}.lora_up.weight": torch.randn(3072, 4)}
    out = convert_lora(file, "diffusers", {"modelspec.architecture": "flux-1-dev/lora"})
    torch.testing.assert_close(out[f"text_encoder_2.{path}.lora_B.weight"], b)
    assert f"text_encoders.t5xxl.transformer.{path}.lora_up.weight" in convert_lora(
        file, "comfy", {"modelspec.architecture": "flux-1-dev/lora"}
    )
