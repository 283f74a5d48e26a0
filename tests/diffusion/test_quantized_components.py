"""Pipelines with components of codes: each is decoded by its own config, and written with that of floats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.diffusion import text_encoder
from tests.helpers.quantized import fp8_blocks
from tests.tolerances import F32_ELEMENTWISE, relative_error

import actmat
from actmat.checkpoints.resolve import open_handle, open_tensors
from actmat.errors import CheckpointError, MergeError

QUICK: dict[str, Any] = {"threads": 1, "durable": False}
ENTRY = {"quant_method": "fp8", "weight_block_size": [8, 4]}
NAME = "blocks.0.attn1.to_q.weight"


def save_pipeline(folder: Path) -> None:
    """A tiny transformer of Wan 2.1, and a text encoder."""
    from diffusers import WanTransformer3DModel

    kinds = {"transformer": ["diffusers", "WanTransformer3DModel"], "text_encoder": ["transformers", "CLIPTextModel"]}
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **kinds}))
    torch.manual_seed(6)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
    WanTransformer3DModel(in_channels=4, out_channels=4, num_layers=2, **sizes).save_pretrained(folder / "transformer")
    text_encoder().save_pretrained(folder / "text_encoder")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, and `coded`, whose transformer alone is stored in blocks of 8 x 4."""
    place = tmp_path_factory.mktemp("components")
    for name in ("plain", "coded"):
        save_pipeline(place / name)
    folder = place / "coded" / "transformer"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for stored in [n for n in tensors if n.endswith("attn1.to_q.weight")]:
        tensors |= fp8_blocks(stored, tensors.pop(stored), (8, 4))[0]
    save_file(tensors, file)
    edit_json(folder / "config.json", quantization_config=ENTRY, dtype="float32")
    return place


def test_a_component_of_codes_is_read_by_its_own_config(home: Path) -> None:
    with open_tensors(home / "plain") as plain, open_tensors(home / "coded") as coded:
        name = f"transformer.{NAME}"
        assert coded.specs.keys() == plain.specs.keys()
        assert "per block of 8x4" in coded.parts(name)[1]
        assert coded.parts("text_encoder.final_layer_norm.weight")[1] == ""
        stored = [s.name for s in coded.parts(name)[0]]
        assert stored == [NAME, f"{NAME}_scale_inv"]
        tensors = load_file(next((home / "coded" / "transformer").glob("*.safetensors")))
        expected = fp8_blocks(NAME, load_file(next((home / "plain" / "transformer").glob("*.safetensors")))[NAME],
                              (8, 4))  # fmt: skip
        assert torch.equal(tensors[NAME].view(torch.uint8), expected[0][NAME].view(torch.uint8))
        assert torch.equal(coded.read(name), expected[1])
        with open_handle(coded.handle()) as again:
            assert torch.equal(again.read(name), expected[1])


def test_the_output_is_a_pipeline_of_floats(home: Path, tmp_path: Path) -> None:
    report = actmat.merge(home / "coded", [home / "plain"], out=tmp_path / "out", method="linear", **QUICK)
    config = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"
    assert "quantization_config" not in config
    assert (tmp_path / "out" / "text_encoder" / "config.json").read_text() == (
        home / "coded" / "text_encoder" / "config.json"
    ).read_text()
    found = load_file(next((tmp_path / "out" / "transformer").glob("*.safetensors")))
    plain = load_file(next((home / "plain" / "transformer").glob("*.safetensors")))
    assert found.keys() == plain.keys()
    assert relative_error(found[NAME], plain[NAME]) < F32_ELEMENTWISE
    assert any("the base stores" in note.text and "as codes" in note.text for note in report.plan.notes)


def test_an_unknown_method_of_a_component_is_refused(home: Path, tmp_path: Path) -> None:
    save_pipeline(tmp_path / "odd")
    edit_json(tmp_path / "odd" / "transformer" / "config.json", quantization_config={"quant_method": "quanto"})
    with pytest.raises(MergeError, match=r"declares quantized weights \(quanto\)"):
        actmat.plan(tmp_path / "odd", [home / "plain"])
    (file,) = (home / "coded" / "transformer").glob("*.safetensors")
    save_file(load_file(file), tmp_path / "odd" / "transformer" / file.name)
    with pytest.raises((MergeError, CheckpointError), match="look quantized"):
        actmat.plan(tmp_path / "odd", [home / "plain"])
