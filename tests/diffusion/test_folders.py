"""Folders of diffusers: single models and whole pipelines, merged into what `from_pretrained` loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.diffusion import image_of, moved, pipeline, unet, vae
from tests.helpers.models import stored
from tests.tolerances import F32_FORWARD, relative_error

import actmat
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError, MergeError

QUICK: dict[str, Any] = {"threads": 1, "durable": False}


@pytest.fixture(scope="module")
def unets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts, each a UNet."""
    home = tmp_path_factory.mktemp("unets")
    unet().save_pretrained(home / "base")
    for seed in (1, 2):
        moved(unet(), seed).save_pretrained(home / f"e{seed}")
    return home


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts, each a pipeline; the experts' VAEs are the base's."""
    home = tmp_path_factory.mktemp("pipelines")
    pipeline(home / "t0").save_pretrained(home / "base")
    for seed in (1, 2):
        expert = pipeline(home / f"t{seed}")
        moved(expert.unet, seed)
        moved(expert.text_encoder, seed)
        expert.save_pretrained(home / f"e{seed}")
    return home


def loads(model: Any, folder: Path) -> Any:
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


def forward(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sample, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 16, generator=generator)
    with torch.no_grad():
        out: torch.Tensor = model(sample, 3, text).sample
    return out


@pytest.mark.parametrize("size", ["5GB", pytest.param("20KB", marks=pytest.mark.slow)])
def test_a_merged_unet_loads_and_runs(unets: Path, tmp_path: Path, size: str) -> None:
    report = actmat.merge(
        unets / "base",
        [unets / "e1", unets / "e2"],
        method="average",
        out=tmp_path / "out",
        max_shard_size=size,
        **QUICK,
    )
    names = {p.name for p in Path(report.out).glob("*.safetensors*")}
    if size == "5GB":
        assert names == {"diffusion_pytorch_model.safetensors"}
    else:
        assert "diffusion_pytorch_model.safetensors.index.json" in names
        assert len(names) > 2
    found = loads(unet(), Path(report.out))
    wanted = unet()
    first, second = (dict(moved(unet(), s).named_parameters()) for s in (1, 2))
    with torch.no_grad():
        for name, parameter in wanted.named_parameters():
            parameter.copy_((first[name] + second[name]) / 2)
    assert relative_error(forward(found), forward(wanted)) < F32_FORWARD
    assert report.plan.family == "UNet2DConditionModel"
    assert actmat.verify(report.out).ok
    assert "dtype" not in json.loads((Path(report.out) / "config.json").read_text())


def test_what_a_unet_packs_and_convolves(unets: Path) -> None:
    items = {i.name: i for i in actmat.plan(unets / "base", [unets / "e1", unets / "e2"]).items}
    block = "down_blocks.1.attentions.0"
    assert [b.name for b in items[f"{block}.transformer_blocks.0.ff.net.0.proj.weight"].layout.blocks] == [
        "value",
        "gate",
    ]
    assert items[f"{block}.proj_in.weight"].action == "merge"  # a convolution of one point
    assert "a linear map of channels" in items[f"{block}.proj_in.weight"].reason
    assert items["conv_in.weight"].action == "average"
    assert "merges it unfolded" in items["conv_in.weight"].reason
    rule = {"match": "mid_block.resnets.*.conv*.weight", "method": "actmat"}
    ruled = {i.name: i for i in actmat.plan(unets / "base", [unets / "e1", unets / "e2"], rules=[rule]).items}
    assert ruled["mid_block.resnets.0.conv1.weight"].action == "merge"


@pytest.mark.slow
def test_a_kernel_is_unfolded_for_the_method(unets: Path, tmp_path: Path) -> None:
    """A 3 x 3 convolution by a rule: what a matrix of out x (in 3 3) would be merged to."""
    rule = {"match": "conv_in.weight", "method": "actmat"}
    report = actmat.merge(unets / "base", [unets / "e1", unets / "e2"], rules=[rule], out=tmp_path / "out", **QUICK)
    start, *experts = (stored(unets / n)["conv_in.weight"] for n in ("base", "e1", "e2"))
    deltas = [(e - start).flatten(1) for e in experts]
    wanted = actmat.merge_matrices("actmat", deltas).reshape(start.shape)
    found = stored(Path(report.out))["conv_in.weight"] - start
    assert relative_error(found, wanted) < F32_FORWARD


def test_variants_are_read_where_there_is_nothing_else(unets: Path, tmp_path: Path) -> None:
    for name, seed in (("base", 0), ("e1", 1)):
        model = unet() if name == "base" else moved(unet(), seed)
        model.half().save_pretrained(tmp_path / name, variant="fp16", max_shard_size="20KB" if seed else "1GB")
    assert not (tmp_path / "base" / "diffusion_pytorch_model.safetensors").exists()
    report = actmat.merge(tmp_path / "base", [tmp_path / "e1"], method="average", out=tmp_path / "out", **QUICK)
    assert loads(unet(), Path(report.out)).dtype == torch.float32
    assert {t.dtype for t in stored(Path(report.out)).values()} == {torch.float16}
    unet().save_pretrained(tmp_path / "base")
    with open_model(tmp_path / "base") as both:
        assert {s.dtype for s in both.specs.values()} == {"float32"}
        assert "diffusion_pytorch_model.fp16.safetensors" in both.folder.side_files.left_out


def test_a_pipeline_is_merged_component_by_component(pipelines: Path, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    report = actmat.merge(
        pipelines / "base", [pipelines / "e1", pipelines / "e2"], out=tmp_path / "out", max_shard_size="30KB", **QUICK
    )
    out = Path(report.out)
    assert (out / "unet" / "diffusion_pytorch_model.safetensors.index.json").exists()
    assert (out / "scheduler" / "scheduler_config.json").exists()
    assert (out / "tokenizer" / "vocab.json").exists() or (out / "tokenizer" / "tokenizer.json").exists()
    image = image_of(DiffusionPipeline.from_pretrained(out))
    assert torch.isfinite(image).all()
    before = image_of(DiffusionPipeline.from_pretrained(pipelines / "base"))
    assert relative_error(image, before) > 0.001
    assert report.plan.family == "StableDiffusionPipeline"
    assert any("pipeline with weights in" in n for n in map(str, report.plan.notes))
    assert actmat.verify(out).ok
    again = actmat.merge(
        pipelines / "base", [pipelines / "e1", pipelines / "e2"], out=tmp_path / "out", max_shard_size="30KB", **QUICK
    )
    assert again.was_finished
    for name, tensor in stored(pipelines / "base" / "vae").items():
        assert torch.equal(stored(out / "vae")[name], tensor)


def test_a_scheduler_tells_what_a_pipeline_predicts(pipelines: Path, tmp_path: Path) -> None:
    shutil.copytree(pipelines / "e1", tmp_path / "e1")
    path = edit_json(tmp_path / "e1" / "scheduler" / "scheduler_config.json", prediction_type="v_prediction")
    with pytest.raises(MergeError, match=r"scheduler\.prediction_type \(base epsilon; 'e1' v_prediction\)"):
        actmat.plan(pipelines / "base", [tmp_path / "e1"])
    actmat.merge(pipelines / "base", [tmp_path / "e1"], out=tmp_path / "out", config_from="e1", **QUICK)
    written = json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())
    assert written == json.loads(path.read_text())


def test_settings_in_the_index_of_a_pipeline_are_compared(pipelines: Path, tmp_path: Path) -> None:
    shutil.copytree(pipelines / "e1", tmp_path / "e1")
    edit_json(tmp_path / "e1" / "model_index.json", boundary_ratio=0.9, safety_checker=["diffusers", "Other"])
    notes = [note.text for note in actmat.plan(pipelines / "base", [tmp_path / "e1"]).notes]
    assert "model_index.json differs (boundary_ratio in expert 'e1'): that of the base is written" in notes


@pytest.mark.parametrize("is_base", [True, False])
def test_a_text_encoder_in_the_names_of_another_transformers(pipelines: Path, tmp_path: Path, is_base: bool) -> None:
    """Version 4 saves them below `text_model`."""
    shutil.copytree(pipelines / ("base" if is_base else "e1"), tmp_path / "old")
    file = tmp_path / "old" / "text_encoder" / "model.safetensors"
    save_file({f"text_model.{n}": t for n, t in stored(file.parent).items()}, file, {"format": "pt"})
    base, expert = (tmp_path / "old", pipelines / "e1") if is_base else (pipelines / "base", tmp_path / "old")
    fields = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "out": tmp_path / "out"}
    out = actmat.merge(base, [expert], **fields, **QUICK).out
    right, found = (stored(Path(place) / "text_encoder") for place in (pipelines / "e1", str(out)))
    assert len(found) == len(right)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, right[name.removeprefix("text_model.")])


@pytest.mark.slow
def test_a_component_merges_like_the_model_alone(pipelines: Path, tmp_path: Path) -> None:
    whole = actmat.merge(pipelines / "base", [pipelines / "e1", pipelines / "e2"], out=tmp_path / "whole", **QUICK)
    for part in ("unet", "text_encoder"):
        alone = actmat.merge(
            pipelines / "base" / part,
            [{"path": str(pipelines / e / part), "name": e} for e in ("e1", "e2")],
            out=tmp_path / part,
            **QUICK,
        )
        mine, its = stored(Path(whole.out) / part), stored(Path(alone.out))
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[n], its[n]) for n in its)


def test_a_component_that_an_expert_lacks_is_copied(pipelines: Path, tmp_path: Path) -> None:
    """An expert of the UNet only, as it is published most often."""
    from diffusers import DiffusionPipeline

    report = actmat.merge(
        pipelines / "base", [pipelines / "e1" / "unet"], method="average", out=tmp_path / "out", **QUICK
    )
    reasons = {i.reason for i in report.plan.items if i.name.startswith("vae.")}
    assert reasons == {"expert 'unet' has no vae (vae.*): copied from the base"}
    assert not [n.text for n in report.plan.notes if "tokenizer" in n.text], "a component has none"
    merged = [i for i in report.plan.items if i.name.startswith("unet.")]
    assert {i.action for i in merged} <= {"average", "merge"}
    out = Path(report.out)
    assert all(torch.equal(t, stored(pipelines / "e1" / "unet")[n]) for n, t in stored(out / "unet").items())
    assert torch.isfinite(image_of(DiffusionPipeline.from_pretrained(out))).all()


@pytest.mark.slow
def test_an_interrupted_pipeline_goes_on(pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (pipelines / "base", [pipelines / "e1", pipelines / "e2"])
    with monkeypatch.context() as patch:
        patch.setattr("actmat.run.output.copy_sidecars", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            actmat.merge(*args, out=tmp_path / "out", **QUICK)
    report = actmat.merge(*args, out=tmp_path / "out", **QUICK)
    assert report.resumed == len([i for i in report.plan.items if i.action != "tie"])
    whole = actmat.merge(*args, out=tmp_path / "whole", **QUICK)
    for file in sorted(Path(whole.out).rglob("*.safetensors")):
        name = file.relative_to(whole.out)
        assert (Path(report.out) / name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_a_pipeline_goes_to_a_bucket(pipelines: Path, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    url = f"file://{tmp_path}/bucket"
    actmat.merge(pipelines / "base", [pipelines / "e1"], out=url, max_shard_size="30KB", **QUICK)
    left = [p.name for p in (tmp_path / "bucket").rglob(".*")]
    assert left == []
    assert torch.isfinite(image_of(DiffusionPipeline.from_pretrained(tmp_path / "bucket"))).all()


def test_what_cannot_be_read_is_named(pipelines: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(pipelines / "base", tmp_path / "copy")
    weights = tmp_path / "copy" / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_flax_model.msgpack"))
    with pytest.raises(CheckpointError, match=r"vae: diffusion_flax_model\.msgpack is a Flax checkpoint"):
        open_tensors(tmp_path / "copy")
    vae().save_pretrained(tmp_path / "vae")
    with pytest.raises(MergeError, match="missing in expert 'vae'"):
        actmat.plan(pipelines / "base" / "unet", [tmp_path / "vae"])
    with pytest.raises(CheckpointError, match="read from a local folder or from the hub"):
        open_tensors(f"file://{pipelines}/base")
