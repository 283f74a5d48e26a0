"""Every kind of expert against the shipped conformance suite."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.adapters import InOneFolder, save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder, save_sharded
from tests.helpers.plugged import plug
from tests.helpers.toy_adapters import TOY, save_toy
from torch import Tensor

from actmat.checkpoints.resolve import open_model
from actmat.extras.conformance.deltas import DeltasConformance, StoredExpert


def base_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first.weight": (6, 5), "second.weight": (4, 6), "second.bias": (4,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


class TestFullCheckpoint(DeltasConformance):
    kinds = frozenset({"stored"})

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> Path:
        return save_folder(folder, tensors)

    def store(self, folder: Path, seed: int) -> StoredExpert:
        base, tuned = save_folder(folder / "base", base_tensors()), base_tensors(seed)
        return StoredExpert(base, self.save(folder / "expert", tuned), tuned)


class TestShardedCheckpoint(TestFullCheckpoint):
    def save(self, folder: Path, tensors: dict[str, Tensor]) -> Path:
        folder.mkdir()
        save_sharded(tensors, folder, shards=2)
        return folder


class Lora(InOneFolder, DeltasConformance):
    """An adapter that PEFT wrote; PEFT's own merge gives the tuned tensors.

    Attributes:
        family: of `tests.helpers.adapters.tiny`.
        options: of `peft.LoraConfig`.
    """

    kinds = frozenset({"formed", "zero"})
    family: str
    options: ClassVar[dict[str, Any]]

    def store(self, folder: Path, seed: int) -> StoredExpert:
        place = self.shared / str(seed)  # adapters are only read, so one serves all tests
        if not place.exists():
            self.save_model(tiny(self.family).state_dict(), place / "base")
            self.save_model(save_adapter(place / "adapter", self.family, seed, **self.options), place / "tuned")
        with open_model(place / "tuned") as tuned:
            return StoredExpert(place / "base", place / "adapter", {n: tuned.tensors.read(n) for n in tuned.specs})

    def save_model(self, state: dict[str, Tensor], folder: Path) -> None:
        model = tiny(self.family)
        model.load_state_dict(state)
        model.save_pretrained(folder)


class TestLoraOfLinearLayers(Lora):
    family = "llama"
    options: ClassVar = {
        "r": 2,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"0.self_attn.q_proj": 3},
    }


class TestLoraOfConv1DWithBias(Lora):
    family = "gpt2"
    options: ClassVar = {
        "r": 2,
        "target_modules": ["c_fc", "c_attn"],
        "fan_in_fan_out": True,
        "lora_bias": True,
    }


class TestLoraOfStackedExperts(Lora):
    family = "mixtral"
    options: ClassVar = {
        "r": 2,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }


class TestLoraWithTensorsTrainedInFull(Lora):
    kinds = frozenset({"stored", "formed", "zero"})
    family = "vit"
    options: ClassVar = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]}


class TestLoraOfATiedEmbedding(Lora):
    """A base that stores both names of the table; the expert gives it under the one that the adapter changes."""

    family = "gpt2"
    options: ClassVar = {"r": 3, "target_modules": ["wte", "wpe"]}

    def save_model(self, state: dict[str, Tensor], folder: Path) -> None:
        save_folder(folder, {name: tensor.clone() for name, tensor in state.items()})
        (folder / "config.json").write_text(json.dumps(tiny(self.family).config.to_dict()))

    def test_one_name_of_the_table_is_given(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as (base, expert, _):
            assert set(base.specs) - set(expert.specs) == {"lm_head.weight"}
            assert expert.source("transformer.wte.weight").kind == "formed"


class TestLoraOfConvolutions(Lora):
    family = "vision"
    options: ClassVar = {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["line", "plane", "point", "solid", "head"],
    }

    def save_model(self, state: dict[str, Tensor], folder: Path) -> None:
        save_folder(folder, state)


def register_toy() -> None:
    """Make the toy family known to a process that ends with the tests."""
    plug(pytest.MonkeyPatch(), "actmat.experts", "toy", TOY)


class TestToyFamily(DeltasConformance):
    """A family that this test registers."""

    kinds = frozenset({"formed", "zero"})
    register = staticmethod(register_toy)

    @pytest.fixture(autouse=True)
    def _register(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plug(monkeypatch, "actmat.experts", "toy", TOY)

    def store(self, folder: Path, seed: int) -> StoredExpert:
        base, tensors = save_folder(folder / "base", base_tensors()), base_tensors()
        up_O, down_I = base_tensors(seed + 10)["first.weight"][:, 0], base_tensors(seed + 10)["second.bias"]
        save_toy(folder / "toy", "second.weight", down_I, up_O)
        tensors["second.weight"] += torch.outer(down_I, up_O)
        return StoredExpert(base, folder / "toy", tensors)
