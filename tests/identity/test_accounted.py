"""Trained weights that a merge does not read are said, also with --quiet, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_lora
from tests.helpers.merging import CONFIG, EMBEDDING, Q0, actmat, expert_of, llama_tensors, save_checkpoint
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.planning.missing import missing_problems

BASE = llama_tensors()
SCORE = "score.weight"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save_checkpoint(tmp_path / "base", BASE)


def save_adapter(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    factors = {Q0.removesuffix(".weight"): (torch.ones(2, 8), torch.ones(8, 2))}
    save_lora(folder, factors, **{"target_modules": ["q_proj"]} | fields)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{n}": t for n, t in tensors.items()}, file)
    return folder


def said(*flags: str) -> tuple[int, str]:
    done = actmat(["merge", "-b", "base", "-e", "expert", "--out", "out", "--quiet", *flags])
    return done.code, " ".join((done.out + done.err).split())


@pytest.mark.parametrize(
    "name",
    ["non_lora_trainables.bin", "value_head.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin", "other/"],
)
def test_weights_beside_an_adapter_are_said(name: str, base: Path) -> None:
    folder = save_adapter(Path("expert"), {})
    for other in (name, "optimizer.pt", "training_args.bin", "checkpoint-9/"):
        file = folder / other / "adapter_model.safetensors" if other.endswith("/") else folder / other
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"any")
    code, text = said()
    assert code == 0, text
    assert text == (
        f"warning: expert 'expert' has weights beside its adapter that are not merged: '{name}'. If it needs them, "
        "merge them by themselves, or load them after the merge with the code that trained them"
    )


ADAPTERS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "a head that the base lacks": ({SCORE: torch.ones(3, 8)}, {}, "has 'score.weight' 3x8, which the base lacks"),
    "an empty head": ({SCORE: torch.ones(0)}, {}, "is empty. Likely cause: it was saved while it was sharded"),
    "an empty table": ({EMBEDDING: torch.ones(0)}, {"modules_to_save": ["embed_tokens"]}, "is empty. Likely cause"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_trained_tensors_that_cannot_be_merged_are_refused(case: str, base: Path) -> None:
    tensors, fields, wanted = ADAPTERS[case]
    save_adapter(Path("expert"), tensors, **fields)
    code, text = said()
    assert (code, wanted in text) == (1, True), text
    if "lacks" in case:
        assert "(--drop 'base_model.model.score.*')" in text
        assert said("--drop", "base_model.model.score.*")[0] == 0


@pytest.mark.parametrize(("listed", "is_lost"), [(["lm_head"], True), (["classifier", "score"], True), (None, False)])
def test_modules_that_are_not_in_the_file_are_said(listed: list[str] | None, is_lost: bool, base: Path) -> None:
    save_adapter(Path("expert"), {}, modules_to_save=listed)
    code, text = said()
    assert code == 0, text
    assert ("its file has no tensor of them" in text) == is_lost


def test_a_saved_head_is_not_lost(base: Path) -> None:
    save_checkpoint(Path("base"), BASE | {SCORE: torch.zeros(3, 8)})
    save_adapter(Path("expert"), {SCORE: torch.ones(3, 8)}, modules_to_save=["classifier", "score"])
    assert said() == (0, "")
    assert torch.equal(load_file("out/model.safetensors")[SCORE], torch.ones(3, 8))


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("projector/model.safetensors", True),
        ("adapter.pt", True),
        ("model-00002-of-00002.safetensors", True),  # which the index does not name
        ("onnx/model.pt", False),
        ("pytorch_model-00002-of-00002.bin", False),
    ],
)
def test_weights_beside_a_full_expert_are_said(name: str, is_said: bool, base: Path) -> None:
    expert = save_checkpoint(Path("expert"), expert_of(BASE, 1))
    (expert / "model.safetensors").rename(expert / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(BASE, "model-00001-of-00002.safetensors")}
    (expert / "model.safetensors.index.json").write_text(json.dumps(index))
    (expert / name).parent.mkdir(exist_ok=True)
    (expert / name).write_bytes(b"any")
    code, text = said()
    assert (code, "weights beside its model that are not merged" in text) == (0, is_said), text


EXTRA: dict[str, tuple[dict[str, Tensor], str]] = {
    "a buffer": ({"model.embeddings.position_ids": torch.ones(1, 4)}, ""),
    "a buffer that moved": ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, ""),
    "a head": ({SCORE: torch.ones(3, 8)}, "--drop 'score.*'"),
    "a part of each layer": (
        {Q0.replace("q_proj", "q_norm"): torch.ones(4)},
        "--drop 'model.layers.*.self_attn.q_norm.*'",
    ),
    "a moving average": ({f"ema.{n}": t for n, t in BASE.items()}, "--drop 'ema.*'"),
}


@pytest.mark.parametrize("case", EXTRA)
def test_trained_tensors_of_a_checkpoint_that_the_base_lacks_are_refused(case: str, base: Path) -> None:
    tensors, flag = EXTRA[case]
    save_checkpoint(Path("expert"), expert_of(BASE, 1) | tensors)
    code, text = said()
    assert (code, flag in text) == (bool(flag), True), text
    if flag:
        assert said("--drop", flag.split("'")[1]) == (0, "")


def test_float_indices_are_copied(base: Path) -> None:
    ids = "model.embeddings.position_ids"
    for folder, value in (("base", 0.0), ("expert", 0.5)):
        save_checkpoint(Path(folder), expert_of(BASE, 0) | {ids: torch.arange(4.0)[None] + value})
    assert said()[0] == 0
    assert torch.equal(load_file("out/model.safetensors")[ids], torch.arange(4.0)[None])


@pytest.mark.parametrize(
    ("name", "other", "keeps"),
    [("head.weight", "out.weight", False), ("head.weight", "out.bias", True), ("a.bias", "b.bias", False)],
)
def test_keep_is_advised_only_if_no_other_name_may_be_it(name: str, other: str, keeps: bool) -> None:
    shape = (4,) if name.endswith("bias") else (4, 8)
    stranger = (4, 8) if other == "out.weight" else (4,)
    others = {other: TensorSpec(other, stranger, "float32", "")}
    (found,) = missing_problems([TensorSpec(name, shape, "float32", "")], ["x"], others, "e", "place")
    assert ("--keep" in found) == keeps
    assert (f"it has '{other}', which the base lacks" in found) != keeps


def test_a_merge_says_that_its_output_has_no_tokenizer(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    save_checkpoint(Path("expert"), expert_of(BASE, 1), CONFIG)
    done = actmat(["merge", "-b", "base", "-e", "expert", "--out", "out", "--set", "files_from=base"])
    assert "tokenizer.json differs (only in expert 'expert'): none is written" in done.words
    actmat(["merge", "-b", "base", "-e", "expert", "--out", "o"], code=0)
    assert Path("o/tokenizer.json").exists()
