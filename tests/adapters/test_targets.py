"""Factors of modules that PEFT does not build: refused with the field, for every way of choosing modules."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from tests.helpers.adapters import LLAMA, save_peft, tiny
from tests.helpers.checkpoint_files import edit_config

import actmat
from actmat.checkpoints.memory import hold_model
from actmat.errors import MergeError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.targets import Targets

MODULES = [
    *(f"model.layers.{i}.self_attn.{n}_proj" for i in range(3) for n in "qkv"),
    *(f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(2) for j in range(2)),
    *("h.0.attn.q_proj", "transformer.h.1.attn.c_attn", "encoder.block.1.layer.0.SelfAttention.q", "score.dense"),
    *("lm_head", "model.embed_tokens", "q_proj"),
]
QV = ["q_proj", "v_proj", "down_proj", "q", "c_attn"]
FIELDS: list[dict[str, Any]] = [
    {"target_modules": QV},
    {"target_modules": QV, "exclude_modules": ["v_proj"]},
    {"target_modules": QV, "exclude_modules": ["layers.1.self_attn.q_proj", "lm_head"]},
    {"target_modules": QV, "exclude_modules": r".*\.1\..*"},
    {"target_modules": [*QV, "score.dense", "lm_head"], "modules_to_save": ["score", "lm_head"]},
    {"target_modules": QV, "modules_to_save": ["layers"]},
    {"target_modules": QV, "layers_to_transform": [0, 2]},
    {"target_modules": QV, "layers_to_transform": 1},
    {"target_modules": QV, "layers_to_transform": []},
    {"target_modules": QV, "layers_to_transform": [0], "layers_pattern": "layers"},
    {"target_modules": QV, "layers_to_transform": [1], "layers_pattern": ["h", "experts"]},
    {"target_modules": QV, "layers_to_transform": [1], "layers_pattern": []},
    {"target_modules": ["q_proj", "model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
    {"target_modules": r".*\.self_attn\.(q|k)_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": ["q"], "layers_to_transform": [0]},
    {"target_modules": ["q"], "layers_to_transform": [2]},
    {"target_modules": ["q"], "layers_to_transform": [0], "layers_pattern": "layer"},
    {"target_modules": r"model\.layers\.[01]\..*_proj|lm_head", "exclude_modules": "lm_head"},
]


def is_built_by_last_number(config: LoraConfig, module: str) -> bool:
    """The rule until PEFT 0.19: without the numbers before the last one."""
    last = re.sub(r"\.\d+(?=\..*\.\d+\.)", "", module)
    return bool(check_target_module_exists(config, last)) and not config.exclude_modules


@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: "-".join(f))
def test_modules_are_those_that_peft_builds(fields: dict[str, Any]) -> None:
    config, targets = LoraConfig(**fields), Targets(fields)
    built = [m for m in MODULES if check_target_module_exists(config, m) or is_built_by_last_number(config, m)]
    assert [m for m in MODULES if not targets.problems([m])] == built


def test_tied_modules_are_added() -> None:
    """By PEFT 0.19, which does not write them into the config."""
    fields = {"target_modules": QV, "ensure_weight_tying": True}
    assert not Targets(fields).problems(["lm_head", "model.embed_tokens"])
    assert Targets(fields).problems(["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize("value", [None, [], "all-linear", "All-Linear", "(?=q)q_proj"])
def test_what_the_config_leaves_open_is_not_refused(value: Any) -> None:
    assert not Targets({"target_modules": value}).problems(MODULES)
    config, problems = parse_adapter_config({"peft_type": "LORA", "r": 1, "target_modules": value})
    said = Adapter(hold_model({}), config, problems).notes
    assert any("Not checked that it names the modules" in note for note in said) == (value == "(?=q)q_proj")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"modules_to_save": ["mlp"]}, "modules_to_save"),
        ({"target_modules": ".*_proj"}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_a_config_that_leaves_out_stored_factors(kind: str, change: dict[str, Any], field: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    config = LoraConfig(**LLAMA) if kind == "lora" else LoHaConfig(r=2, target_modules=LLAMA["target_modules"])
    save_peft(tmp_path / "one", "llama", 3, config, dtype=torch.float32)
    edit_config(tmp_path / "one", **change)

    def merge() -> dict[str, torch.Tensor]:
        actmat.merge(tmp_path / "base", [tmp_path / "one"], out=tmp_path / "out", method="average", durable=False)
        return load_file(tmp_path / "out" / "model.safetensors")

    if field:
        with pytest.raises(MergeError, match=f"{field} leaves out .* PEFT ignores"):
            merge()
        return
    expected = PeftModel.from_pretrained(tiny("llama"), tmp_path / "one").merge_and_unload().state_dict()
    for name, tensor in merge().items():
        torch.testing.assert_close(tensor, expected[name])
