"""Every family of PEFT that is no plain LoRA, against the shipped conformance suite and PEFT's own merge.

Deltas are held against `merge_and_unload` on tiny models in float64, to 1e-12 of the norm of a tensor; PiSSA and OLoRA,
which PEFT initializes in float32 only, to 1e-5.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    TrainableTokensConfig,
    VeraConfig,
)
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import InOneFolder, save_base, save_peft, tiny
from tests.helpers.located import open_expert
from torch import Tensor

import actmat
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import MergeError
from actmat.extras.conformance.deltas import DeltasConformance, StoredExpert
from actmat.report.verify import verify

LINEAR = ["q_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj"]
CONVOLUTIONS = ["line", "plane", "point", "head"]


class Family(InOneFolder, DeltasConformance):
    """One config of PEFT.

    Attributes:
        model: of `tests.helpers.adapters.tiny`.
        options: of the config.
        scale: of the random changes.
    """

    kinds = frozenset({"formed", "zero"})
    model = "llama"
    config: type[PeftConfig]
    options: ClassVar[dict[str, Any]]
    dtype = torch.float64
    scale = 0.3

    def store(self, folder: Path, seed: int) -> StoredExpert:
        place = self.shared / str(seed)
        if not place.exists():
            base = save_base(self.model, place / "base", self.dtype)
            config = self.config(**self.options)
            tuned = save_peft(place / "adapter", self.model, seed, config, dtype=self.dtype, scale=self.scale)
            with open_tensors(base) as opened:  # transformers writes some names otherwise
                named = {n: tuned[n] for n in opened.specs}
            save_file({n: t.clone() for n, t in named.items()}, place / "tuned.safetensors")
        return StoredExpert(place / "base", place / "adapter", dict(load_file(place / "tuned.safetensors")))


class TestDora(Family):
    config = LoraConfig
    options: ClassVar = {"r": 2, "use_dora": True, "target_modules": LINEAR, "rank_pattern": {"q_proj": 3}}


class TestDoraOfTransposedLayersAndATable(Family):
    model = "gpt2"
    config = LoraConfig
    options: ClassVar = {"r": 2, "use_dora": True, "target_modules": [*GPT2, "wpe"], "fan_in_fan_out": True}


class TestDoraOfConvolutions(Family):
    model = "vision"
    config = LoraConfig
    options: ClassVar = {"r": 2, "use_dora": True, "target_modules": CONVOLUTIONS}


class TestLoHa(Family):
    config = LoHaConfig
    options: ClassVar = {"r": 2, "alpha": 3, "target_modules": LINEAR, "alpha_pattern": {"q_proj": 5}}


class TestLoHaOfConvolutions(Family):
    model = "vision"
    config = LoHaConfig
    options: ClassVar = {"r": 2, "alpha": 3, "target_modules": CONVOLUTIONS, "use_effective_conv2d": True}


class TestLoKr(Family):
    config = LoKrConfig
    options: ClassVar = {"r": 2, "alpha": 3, "target_modules": LINEAR, "decompose_both": True, "decompose_factor": 2}


class TestLoKrOfConvolutions(Family):
    model = "vision"
    config = LoKrConfig
    options: ClassVar = {"r": 1, "alpha": 3, "target_modules": CONVOLUTIONS, "use_effective_conv2d": True}


class TestIA3(Family):
    config = IA3Config
    options: ClassVar = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


class TestIA3OfTransposedLayersWithBias(Family):
    model = "gpt2"
    config = IA3Config
    options: ClassVar = {"target_modules": GPT2, "feedforward_modules": ["c_proj"], "fan_in_fan_out": True}


class TestIA3OfConvolutions(Family):
    model = "vision"
    config = IA3Config
    options: ClassVar = {"target_modules": ["plane", "point"], "feedforward_modules": ["point"]}


class TestVera(Family):
    config = VeraConfig
    options: ClassVar = {"r": 2, "target_modules": LINEAR}


class TestAdaLora(Family):
    config = AdaLoraConfig
    options: ClassVar = {"init_r": 3, "lora_alpha": 5, "total_step": 10, "target_modules": LINEAR}


ROTATIONS = {"oft_block_size": 4, "target_modules": LINEAR}


class TestOft(Family):
    config = OFTConfig
    options: ClassVar = ROTATIONS
    scale = 0.05


class TestConstrainedOft(Family):
    config = OFTConfig
    options: ClassVar = ROTATIONS | {"coft": True, "eps": 0.1, "use_cayley_neumann": False}
    tolerance = 1e-8  # PEFT rounds eps to float32


class TestSharedOft(Family):
    config = OFTConfig
    options: ClassVar = ROTATIONS | {"block_share": True, "use_cayley_neumann": True, "num_cayley_neumann_terms": 3}
    scale = 0.05


class TestTrainedTokens(Family):
    config = TrainableTokensConfig
    options: ClassVar = {"token_indices": [1, 7, 4], "target_modules": ["embed_tokens"]}


class TestLoraWithTrainedTokensAndAHead(Family):
    kinds = frozenset({"stored", "formed", "zero"})
    config = LoraConfig
    options: ClassVar = {
        "r": 2,
        "target_modules": LINEAR,
        "trainable_token_indices": {"embed_tokens": [29, 0]},
        "modules_to_save": ["lm_head"],
    }


class TestPissa(Family):
    config = LoraConfig
    options: ClassVar = {"r": 2, "init_lora_weights": "pissa", "target_modules": LINEAR, "use_rslora": True}
    dtype = torch.float32
    tolerance = 1e-5


class TestPissaOfTransposedLayers(TestPissa):
    model = "gpt2"
    options: ClassVar = {"r": 2, "init_lora_weights": "pissa", "target_modules": GPT2, "fan_in_fan_out": True}


class TestOlora(TestPissa):
    options: ClassVar = {"r": 3, "lora_alpha": 5, "init_lora_weights": "olora", "target_modules": LINEAR}


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | fields).items() if v != "DROP"}))


CONFIGS: dict[str, PeftConfig] = {
    "dora": LoraConfig(r=2, use_dora=True, target_modules=LINEAR),
    "loha": LoHaConfig(r=2, target_modules=LINEAR),
    "lokr": LoKrConfig(r=2, target_modules=LINEAR),
    "ia3": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "vera": VeraConfig(r=2, target_modules=LINEAR),
    "adalora": AdaLoraConfig(init_r=3, lora_alpha=5, total_step=10, target_modules=LINEAR),
    "oft": OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
    "tokens": TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter of every family."""
    folder = tmp_path_factory.mktemp("families")
    save_base("llama", folder / "base")
    for name, config in CONFIGS.items():
        save_peft(folder / name, "llama", 1, config)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_not_merged_from_it_without_factors(name: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="has no factors from which an adapter could be merged") as error:
        actmat.merge(None, [place / name], out=tmp_path / "out")
    assert "actmat extract" in str(error.value)


EXACT: dict[str, tuple[PeftConfig, torch.dtype, float]] = {
    "vera": (CONFIGS["vera"], torch.float64, 1e-10),
    "adalora": (CONFIGS["adalora"], torch.float64, 1e-10),
    "pissa": (LoraConfig(r=2, init_lora_weights="pissa", target_modules=LINEAR), torch.float32, 2e-5),
    "olora": (LoraConfig(r=2, init_lora_weights="olora", target_modules=LINEAR), torch.float32, 2e-5),
}
"""Families that are exact as LoRA: config, dtype of model and adapter (PEFT initializes two in float32), tolerance."""


@pytest.mark.parametrize("name", EXACT)
def test_families_whose_deltas_are_products_become_lora_exactly(name: str, tmp_path: Path) -> None:
    """The adapter without any rank given, on its base, is PEFT's own merge of the original."""
    config, dtype, tolerance = EXACT[name]
    base = save_base("llama", tmp_path / "base", dtype)
    merged = save_peft(tmp_path / name, "llama", 1, config, dtype=dtype)
    run: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "compute_dtype": "float64"}
    report = actmat.merge(base, [tmp_path / name], out=tmp_path / "out", to="adapter", durable=False, threads=1, **run)
    own = {"vera": 2, "adalora": 3, "pissa": 4, "olora": 4}[name]
    assert {i.write.rank for i in report.plan.items} == {own}
    loaded = PeftModel.from_pretrained(tiny("llama").to(dtype), tmp_path / "out")
    for tensor, value in loaded.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, merged[tensor], rtol=tolerance, atol=tolerance)
    assert verify(tmp_path / "out").ok


def test_two_families_are_merged_into_one_adapter(place: Path, tmp_path: Path) -> None:
    """VeRA and AdaLoRA beside LoRA: ranks add up; those that are no products need a rank, or an energy."""
    lora = LoraConfig(r=1, target_modules=["q_proj"])
    deltas = [save_peft(tmp_path / "lora", "llama", 2, lora)]
    deltas += [save_peft(tmp_path / n, "llama", 1, CONFIGS[n]) for n in ("vera", "adalora")]
    start = {n: t.double() for n, t in tiny("llama").state_dict().items()}
    given = [tmp_path / "lora", place / "vera", place / "adalora"]
    run: dict[str, Any] = {"method": "average", "compute_dtype": "float64", "durable": False, "threads": 1}
    actmat.merge(place / "base", given, out=tmp_path / "out", to="adapter", ranks="pattern", **run)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {5, 6}
    found = PeftModel.from_pretrained(tiny("llama").double(), tmp_path / "out").merge_and_unload().state_dict()
    for name in start:
        expected = start[name] + sum(d[name] - start[name] for d in deltas) / 3
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10)
    for expert, fields in ((place / "dora", {}), (place / "vera", {"method": "ties"})):
        with pytest.raises(MergeError, match="has no rank of its own"):
            actmat.merge(place / "base", [expert], out=tmp_path / "no", to="adapter", **run | fields)


DAMAGE: list[tuple[str, dict[str, object], dict[str, Tensor | None], str]] = [
    ("dora", {}, {"q_proj.lora_magnitude_vector": torch.ones(5)}, "has 5 entries; expected 16"),
    ("dora", {}, {"q_proj.lora_B.weight": None}, "half of a pair"),
    ("dora", {"use_qalora": True}, {}, "QA-LoRA"),
    ("loha", {}, {"q_proj.hada_w1_b": torch.ones(3, 16)}, "do not match"),
    ("loha", {}, {"q_proj.hada_w2_b": None}, "has no hada_w2_b"),
    ("loha", {"alpha": "x"}, {}, "expected a finite number"),
    ("loha", {}, {"q_proj.lokr_w1": torch.ones(2, 2)}, "does not belong to an adapter of the family LoHa"),
    ("lokr", {}, {"q_proj.lokr_w1": None}, "no Kronecker product"),
    ("lokr", {}, {"q_proj.lokr_w1": torch.ones(3, 4)}, "its delta is 12 x 16"),
    ("ia3", {}, {"k_proj.ia3_l": torch.ones(9, 1)}, "it has 9 factors"),
    ("ia3", {"feedforward_modules": ".*"}, {"k_proj.ia3_l": torch.ones(1, 8, 1, 1)}, "is a pattern"),
    ("vera", {}, {"vera_A": None}, "save_projection: false"),
    ("vera", {}, {"q_proj.vera_lambda_d": torch.ones(3)}, "do not match the factors"),
    ("oft", {"use_cayley_neumann": "DROP"}, {}, "an older PEFT"),
    ("oft", {"num_cayley_neumann_terms": -1}, {}, "expected numbers"),
    ("oft", {}, {"q_proj.oft_R.weight": torch.ones(4, 5)}, "expected blocks x upper triangle"),
    ("oft", {}, {"q_proj.oft_R.weight": torch.ones(3, 6)}, "it rotates 12 inputs"),
    ("tokens", {"token_indices": [1]}, {}, "names the rows [1]"),
    ("tokens", {"token_indices": [1, 99]}, {}, "it replaces row 99"),
    ("ia3", {}, {"k_proj.ia3_l": torch.ones(8, 1, dtype=torch.int8)}, "is int8"),
]


@pytest.mark.parametrize(("name", "fields", "change", "words"), DAMAGE, ids=[f"{d[0]}-{d[3]}" for d in DAMAGE])
def test_damage_is_named(
    name: str, fields: dict[str, object], change: dict[str, Tensor | None], words: str, place: Path, tmp_path: Path
) -> None:
    tensors = dict(load_file(place / name / "adapter_model.safetensors"))
    for end, value in change.items():
        found = [n for n in tensors if n.endswith(end)] or [f"base_model.model.model.layers.0.self_attn.{end}"]
        for stored in found:
            tensors.pop(stored, None)
            if value is not None:
                tensors[stored] = value.clone()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((place / name / "adapter_config.json").read_text())
    edit_config(tmp_path, **fields)
    with open_model(place / "base") as base, pytest.raises(MergeError) as error:
        open_expert(tmp_path, base)
    assert words in str(error.value)


def test_a_deltas_rows_do_not_depend_on_the_rest(place: Path) -> None:
    """Slabs of a few rows give the bits of all rows at once."""
    from actmat.experts import fitted as module

    with open_model(place / "base") as base, open_expert(place / "dora", base) as expert:
        name = "model.layers.0.mlp.down_proj.weight"
        whole = expert.dense(name, 0, 16 * 24, torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_SLAB", 24 * 3)
            torch.testing.assert_close(expert.dense(name, 5, 300, torch.float64), whole[5:300], rtol=1e-13, atol=1e-13)
