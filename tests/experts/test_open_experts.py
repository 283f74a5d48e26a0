"""Experts are opened from what a user names, by the first family that claims it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.located import open_expert
from tests.helpers.plugged import plug
from tests.helpers.toy_adapters import TOY, save_toy

import actmat
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.resolve import open_model
from actmat.errors import CheckpointError
from actmat.experts.locate import open_handle

WEIGHT = "model.layers.0.mlp.up_proj.weight"
BASE = {WEIGHT: torch.arange(12.0).view(3, 4), "b": torch.ones(3)}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy family, as an entry point would."""
    plug(monkeypatch, "actmat.experts", "toy", TOY)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("method", ["average", "actmat", "ties"])
def test_a_new_family_is_merged_with_full_checkpoints(method: str, tmp_path: Path) -> None:
    up_O, down_I = torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.5, 1.0, 0.0, 2.0])
    save_file(BASE, tmp_path / "base.safetensors")
    tuned, other = ({**BASE, WEIGHT: BASE[WEIGHT] + d} for d in (torch.outer(up_O, down_I), torch.eye(3, 4)))
    for name, tensors in {"tuned": tuned, "other": other}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    save_toy(tmp_path / "toy", WEIGHT, up_O, down_I)
    for out, first in {"from_toy": "toy", "from_tuned": "tuned.safetensors"}.items():
        experts = [tmp_path / first, tmp_path / "other.safetensors"]
        actmat.merge(tmp_path / "base.safetensors", experts, out=tmp_path / out, method=method, durable=False)
    found, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("from_toy", "from_tuned"))
    assert not torch.equal(expected[WEIGHT], BASE[WEIGHT])
    for name in BASE:
        torch.testing.assert_close(found[name], expected[name])


def test_tensors_and_open_checkpoints_are_experts() -> None:
    base = hold_model(BASE)
    for location in (BASE, hold_model(BASE)):
        with open_expert(location, base) as expert:
            assert torch.equal(expert.read(WEIGHT), BASE[WEIGHT])
            assert expert.config is None


def test_a_full_checkpoint_without_a_base_is_refused(tmp_path: Path) -> None:
    save_file(BASE, tmp_path / "model.safetensors")
    for location in (tmp_path / "model.safetensors", BASE):
        with pytest.raises(CheckpointError, match="expected an adapter"):
            open_expert(location, None)


def test_an_adapter_without_a_base_gives_its_stored_tensors(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 1, **LLAMA)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    with open_expert(tmp_path, None) as expert, open_handle(expert.handle()) as again:
        assert set(expert.adapter.modules) == {n.removeprefix("base_model.model.")[: -len(".lora_A.weight")]
                                               for n in stored if ".lora_A." in n}  # fmt: skip
        assert set(expert.specs) == set(again.specs) == set(stored)
        assert len(expert.model.specs) == len(stored)
        assert expert.stored.hashes == again.stored.hashes
        for name, tensor in stored.items():
            assert expert.source(name).kind == "stored"
            assert torch.equal(again.read(name), tensor)


def test_every_bad_value_of_an_adapter_is_counted(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "a", "llama", 1, **LLAMA)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    first, second = sorted(tensors)[:2]
    tensors[first].view(-1)[:2] = float("nan")
    tensors[second].view(-1)[0] = float("inf")
    save_file(tensors, file)
    with open_model(tmp_path / "base") as base, open_expert(tmp_path / "a", base) as expert:
        assert sorted(expert.stored.check_values("math")) == [
            f"tensor '{first}' of expert 'math' has 2 values that are NaN or Inf",
            f"tensor '{second}' of expert 'math' has 1 values that are NaN or Inf",
        ]


@pytest.mark.usefixtures("toy")
def test_what_is_in_memory_has_no_handle(tmp_path: Path) -> None:
    save_toy(tmp_path / "toy", WEIGHT, torch.ones(3), torch.ones(4))
    base = hold_model(BASE)
    for expert in (open_expert(BASE, base), open_expert(tmp_path / "toy", base)):
        with pytest.raises(CheckpointError, match="cannot be opened by another process"):
            expert.handle()
