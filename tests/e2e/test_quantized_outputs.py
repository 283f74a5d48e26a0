"""`--set quantize=same`: outputs in the base's layout of codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.test_quantized_merges import WRITERS, family, is_coded
from tests.helpers.quantized import compressed, fp8_scaled

from actmat import merge, plan
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import MergeError
from actmat.planning import MergePlan
from actmat.report.verify import verify


def total_error(one: Path, other: Path) -> float:
    with open_checkpoint(one) as a, open_checkpoint(other) as b:
        assert set(a.specs) == set(b.specs)
        return max(float((a.read(n).double() - b.read(n).double()).norm() / b.read(n).double().norm()) for n in a.specs)


@pytest.mark.parametrize("scheme", WRITERS)
def test_the_output_has_the_base_s_layout(scheme: str, tmp_path: Path) -> None:
    coded, plain = family(tmp_path, [WRITERS[scheme]()] * 3)
    report = merge(coded[0], coded[1:], out=tmp_path / "out", method="average", quantize="same", diagnose=True)
    merge(plain[0], plain[1:], out=tmp_path / "floats", method="average", compute_dtype="float32", dtype="float32")
    base, out = (load_file(f / "model.safetensors") for f in (coded[0], tmp_path / "out"))
    assert {n: (t.shape, t.dtype) for n, t in base.items()} == {n: (t.shape, t.dtype) for n, t in out.items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((coded[0] / "config.json").read_text())
    errors = {r["name"]: r["stats"]["quantization_error"] for r in report.manifest["tensors"] if "encoding" in r}
    assert set(errors) == {r["name"] for r in report.manifest["tensors"] if is_coded(r["name"])}
    assert max(errors.values()) == pytest.approx(total_error(tmp_path / "out", tmp_path / "floats"), rel=1e-2)
    assert 0.0 < max(errors.values()) < (0.1 if "int4" in scheme else 0.04)
    assert verify(tmp_path / "out").ok
    assert MergePlan.from_json(report.plan.to_json()) == report.plan


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    ],
)
def test_compressed_tensors_loads_what_is_written(weights: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    coded, _ = family(tmp_path, [compressed(**weights)] * 3)
    merge(coded[0], coded[1:], out=tmp_path / "out", quantize="same")
    with open_checkpoint(tmp_path / "out") as merged:
        read = {n: merged.read(n) for n in merged.specs}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():  # the first run decompresses the weights
        assert bool(model(torch.arange(12).view(1, -1)).logits.isfinite().all())
    loaded = model.state_dict()
    for name, tensor in read.items():
        assert torch.equal(loaded[name], tensor), name


def test_one_and_many_threads_give_the_same_bytes(tmp_path: Path) -> None:
    coded, _ = family(tmp_path, [WRITERS["int4 group"]()] * 2)
    fields: dict[str, Any] = {"method": "actmat", "quantize": "same"}
    merge(coded[0], coded[1:], out=tmp_path / "one", threads=1, **fields)
    merge(coded[0], coded[1:], out=tmp_path / "many", threads=4, max_shard_size="40KB", **fields)
    many = {n: t for f in sorted((tmp_path / "many").glob("*.safetensors")) for n, t in load_file(f).items()}
    for name, tensor in load_file(tmp_path / "one" / "model.safetensors").items():
        assert torch.equal(many[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    coded, plain = family(tmp_path, [(fp8_scaled, {"quant_method": "fp8"})] * 2)
    cases: list[tuple[list[Path], dict[str, Any], str]] = [
        (plain, {}, "is not quantized"),
        (coded, {}, "scales of activations"),
        (coded, {"dtype": "float16"}, "--dtype float16"),
    ]
    for folders, fields, says in cases:
        with pytest.raises(MergeError, match=says):
            plan(folders[0], folders[1:], method="average", quantize="same", **fields)
    with pytest.raises(MergeError, match="written to a folder only"):
        merge(coded[0], coded[1:], quantize="same")
