"""Stacks: layers of several checkpoints as one checkpoint, in locations, handles, configs and merges."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import CONFIG, VOCAB, actmat, llama_tensors, save_checkpoint

from actmat.checkpoints.composed import Composed
from actmat.checkpoints.layer_names import stack_parts
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("configs_read_here")
UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models `a` and `b` of four layers."""
    types = ["full_attention", "sliding_attention"] * 2
    save_checkpoint(tmp_path / "a", llama_tensors(4, seed=1), CONFIG | {"num_hidden_layers": 4, "layer_types": types})
    save_checkpoint(tmp_path / "b", llama_tensors(4, seed=2), CONFIG | {"num_hidden_layers": 4, "layer_types": types})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a[0:2]", ["a[0:2]"]),
        (" org/x@main[0:12]+./b[3:4] + hf://c/d[1:2]", ["org/x@main[0:12]", "./b[3:4]", "hf://c/d[1:2]"]),
        ("a[0:2] b[1:2]", []),
        ("a[0:2] + b", []),
        ("a", []),
        ("a[0]", []),
        ("[0:2]", []),
        ("a[0:2] + ", []),
        ("", []),
    ],
)
def test_locations_of_stacks(text: str, parts: list[str]) -> None:
    assert [str(p) for p in stack_parts(text)] == parts


def test_layers_are_numbered_anew(folder: Path) -> None:
    a, b = (load_file(folder / m / "model.safetensors") for m in "ab")
    with open_model("a[0:3] + b[1:4] + a[2:4]") as stack:
        origins = [(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3), (a, 2), (a, 3)]
        for k, (model, layer) in enumerate(origins):
            assert torch.equal(stack.tensors.read(UP.format(k)), model[UP.format(layer)])
        assert UP.format(8) not in stack.specs
        assert torch.equal(stack.tensors.read("model.embed_tokens.weight"), a["model.embed_tokens.weight"])
        assert stack.specs[UP.format(3)].file == "b/model.safetensors"
        buffer = bytearray(16)
        stack.tensors.read_into(UP.format(4), 32, memoryview(buffer))
        assert bytes(buffer) == b[UP.format(2)].numpy().tobytes()[32:48]
        stack.tensors.prefetch([*stack.specs, "no such tensor"])
        assert len(stack.tensors.identity()) == 2
        with pytest.raises(CheckpointError, match="no such"):
            stack.tensors.read("no such tensor")
    with open_model("b[3:4] + a[0:1]") as stack:
        assert torch.equal(stack.tensors.read("model.embed_tokens.weight"), b["model.embed_tokens.weight"])
        assert torch.equal(stack.tensors.read("model.norm.weight"), a["model.norm.weight"])
        assert torch.equal(stack.tensors.read("lm_head.weight"), a["lm_head.weight"])


def test_a_handle_opens_the_stack_again(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open_model("a[0:1] + b[1:3] + a[3:4]") as stack:
        handle = pickle.loads(pickle.dumps(stack.tensors.handle()))
        with open_handle(handle) as again:
            assert dict(again.specs) == dict(stack.specs)
            assert again.handle() == handle
        wanted = {name: stack.tensors.read(name) for name in stack.specs}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with open_handle(handle) as again:
        assert {n: s.shape for n, s in again.specs.items()} == {n: tuple(t.shape) for n, t in wanted.items()}
        assert all(torch.equal(again.read(n), t) for n, t in wanted.items())
    again.close()
    with pytest.raises(ValueError, match="closed"):
        again.read("model.norm.weight")


def test_all_problems_of_a_stack_in_one_message(folder: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        open_tensors("a[0:9] + b[2:2] + a[1:2]")
    assert "a[0:9]: expected at least one layer within [0:4]" in str(refused.value)
    assert "b[2:2]" in str(refused.value)
    with pytest.raises(CheckpointError) as missing:
        open_tensors("no[0:1] + nor[0:1]")
    assert len(missing.value.problems) == 2
    save_checkpoint(folder / "wide", llama_tensors(4), CONFIG | {"hidden_size": 99})
    with pytest.raises(CheckpointError, match="'hidden_size' is 8 in a, 99 in wide"):
        open_tensors("a[0:1] + wide[0:1]")
    more = {n: torch.cat([t, t[:2]]) if t.shape[:1] == (VOCAB,) else t for n, t in llama_tensors(4).items()}
    save_checkpoint(folder / "more", more, CONFIG | {"vocab_size": VOCAB + 2})
    for text in ("a[0:1] + more[0:1]", "more[0:1] + a[0:1]"):  # the second has no token that the first lacks
        with pytest.raises(CheckpointError, match=r"lm_head.weight, model.embed_tokens.weight: other shapes in"):
            open_tensors(text)
    other = {n.replace("model.layers", "h"): t for n, t in llama_tensors(2).items()}
    save_checkpoint(folder / "other", other)
    with pytest.raises(CheckpointError, match="the layers have different names"):
        open_tensors("a[0:1] + other[0:1]")
    save_checkpoint(folder / "two", {"encoder.0.w": torch.ones(1), "decoder.0.w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="expected one stack of numbered layers"):
        open_tensors("two[0:1]")


def test_a_folder_of_that_name_wins(folder: Path) -> None:
    save_checkpoint(folder / "a[0:1]", llama_tensors(2))
    with open_model("a[0:1]") as found:
        assert not isinstance(found.tensors, Composed)


def test_a_stack_is_copied_without_experts(folder: Path) -> None:
    actmat(["merge", "-b", "a[0:3] + b[1:4]", "--out", "out", "--threads", "1"], code=0)
    got, a, b = (load_file(folder / m / "model.safetensors") for m in ("out", "a", "b"))
    assert torch.equal(got[UP.format(5)], b[UP.format(3)])
    assert torch.equal(got[UP.format(0)], a[UP.format(0)])
    assert json.loads((folder / "out" / "config.json").read_text())["num_hidden_layers"] == 6
    manifest = json.loads((folder / "out" / "actmat_manifest.json").read_text())
    assert {t["action"] for t in manifest["tensors"]} == {"copy"}
    actmat(["verify", "out"], code=0)
    planned = actmat(["plan", "-b", "a[0:3] + b[1:4]"])
    assert "no experts: copied from the base" in planned.out


def test_stacks_are_merged_with_stacks_by_several_workers_alike(folder: Path) -> None:
    flags = ["-b", "a[0:2] + b[0:2]", "-e", "shallow=b[0:2] + a[0:2]", "-m", "slerp", "--set", "scope=all"]
    for threads in "12":
        actmat(["merge", *flags, "--out", f"out{threads}", "--threads", threads, "--quiet"], code=0)
    one, two = ((folder / f"out{t}" / "model.safetensors").read_bytes() for t in "12")
    assert one == two


def test_an_output_over_a_part_is_refused(folder: Path) -> None:
    refused = actmat(["merge", "-b", "a[0:2] + b[0:2]", "--out", "b", "--overwrite"], code=1)
    assert "an input of this merge (base: b)" in refused.err


def test_experts_are_needed_unless_the_base_is_a_stack(folder: Path) -> None:
    actmat(["plan", "-b", "a"], code=2)
    (folder / "r.yaml").write_text("base: a\n")
    refused = actmat(["plan", "r.yaml"], code=1)
    assert "experts: this field is required" in refused.err


def test_paths_in_a_stack_are_relative_to_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "r.yaml").write_text("base: ./a[0:2] + b[1:2]\nexperts: ['b[0:3]']\nmethod: slerp\n")
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    actmat(["plan", "../r.yaml"], code=0)


def test_what_a_stack_leaves_out_of_its_parts_is_said(folder: Path) -> None:
    with open_model("a[0:2] + b[0:2]") as stack:
        before = {note.text for note in stack.folder.notes}
    tensors = load_file(folder / "a" / "model.safetensors")
    config = json.loads((folder / "a" / "config.json").read_text())
    save_checkpoint(folder / "a", {**tensors, "v_head.weight": torch.ones(1, 8)}, config)
    (folder / "b" / "projector.pt").write_bytes(b"any")
    other = load_file(folder / "b" / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    save_file(other | {f"{name}x": other.pop(name)}, folder / "b" / "model.safetensors")
    with open_model("a[0:2] + b[0:2]") as stack:
        texts = {note.text for note in stack.folder.notes if note.severity == "warning"} - before
    assert {text.partition(":")[0] for text in texts} == {
        "tensors that are neither in layers nor in the part that gives them are left out",
        "expert 'b' has weights beside its model that are not merged",
        "layers of one number have other tensors than in the first part",
    }
    assert any(f": {name} (not in b), {name}x (only in b)" in text for text in texts), texts
    tensors.pop("lm_head.weight")
    save_checkpoint(folder / "b", tensors, config)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is in a and not in b, whose table of tokens"):
        open_model("a[0:2] + b[0:2]")
