"""Adapters of separate projections for a base that packs them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny

import actmat
from actmat.errors import MergeError


def test_a_base_that_packs_what_an_adapter_trains_apart_is_refused_in_one_sentence(tmp_path: Path) -> None:
    state = dict(tiny("llama").state_dict())
    for i in range(2):
        at = f"model.layers.{i}.self_attn"
        state[f"{at}.qkv_proj.weight"] = torch.cat([state.pop(f"{at}.{n}_proj.weight") for n in "qkv"])
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    save_adapter(tmp_path / "adapter", "llama", 1, **LLAMA)
    with pytest.raises(MergeError) as error:
        actmat.plan(tmp_path / "base", [tmp_path / "adapter"])
    text = str(error.value)
    assert "4 modules such as 'model.layers.0.self_attn.q_proj' have a delta each" in text
    assert "packs them, as in 'model.layers.0.self_attn.qkv_proj.weight'" in text
    assert "finds no tensor" not in text
