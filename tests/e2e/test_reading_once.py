"""Every byte of every input is read exactly once, whatever the rule, the layout and the number of variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.counting import CountingCheckpoint
from tests.helpers.models import perturbed
from tests.helpers.open_merges import counted, merge_open
from torch import Tensor

from actmat.planning.regions import CHUNK

LARGE = "model.layers.0.mlp.down_proj.weight"
CONFIG = {
    "model_type": "phi3",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def tensors() -> dict[str, Tensor]:
    """One tensor of several chunks, packed ones, a stack of experts, a tie, a buffer, an empty one."""
    torch.manual_seed(0)
    table = torch.randn(60, 32)
    return {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table,
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(64, 32),
        "model.layers.0.mlp.gate_up_proj.weight": torch.randn(2 * 48, 32),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 2 * 16, 32),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 32, 16),
        LARGE: torch.randn(CHUNK // 32 + 5, 48),
        "model.layers.0.input_layernorm.weight": torch.randn(32),
        "position_ids": torch.arange(9),
        "unused.bias": torch.empty(0),
    }


def run(tmp_path: Path, variants: Sequence[Mapping[str, Any]], *, workers: int = 1) -> list[CountingCheckpoint]:
    start = tensors()
    experts = [perturbed(start, 1), perturbed(start, 2)]
    for e in experts:
        e["lm_head.weight"] = e["model.embed_tokens.weight"]
    checkpoints = [counted(t, CONFIG) for t in (start, *experts)]
    merge_open(checkpoints[0], checkpoints[1:], tmp_path, variants, workers=workers)
    return checkpoints


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "average": [{"method": "average"}],
    "actmat": [{"method": "actmat"}],
    "ties per tensor": [{"method": "ties", "options": {"trim": "tensor"}}],
    "capped": [{"method": "actmat", "postprocess": {"norm_cap": "mean", "singular_value_cap": 1.0}}],
    "task arithmetic capped": [{"method": "task_arithmetic", "postprocess": {"norm_cap": "mean"}}],
    "several cut-offs": [{"options": {"rtol": r}} for r in (1e-6, 1e-4, 1e-2)],
    "several kinds of rule": [{"method": m} for m in ("average", "actmat", "dare", "tsv", "task_arithmetic")],
    "several scopes": [{"scope": s} for s in ("linear", "paper", "all")],
    "kept in one": [{"keep": ["*.down_proj*"]}, {}],
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("variants", VARIANTS.values(), ids=VARIANTS.keys())
def test_once(variants: list[dict[str, Any]], workers: int, tmp_path: Path) -> None:
    base, *experts = run(tmp_path, variants, workers=workers)
    assert base.read_other_than_once() == {}, "a tied tensor too, once under each name: they must hold the same bytes"
    for expert in experts:
        assert expert.read_other_than_once(expert.specs.keys() - {"position_ids"}) == {}
        assert expert.bytes_read["position_ids"] == 0


def test_a_large_tensor_is_read_in_chunks(tmp_path: Path) -> None:
    base, first, _ = run(tmp_path, [{"method": "average"}])
    assert base.calls[LARGE] == first.calls[LARGE] == -(-base.specs[LARGE].numel // CHUNK) > 1


def test_kept_tensors_are_not_read_from_experts(tmp_path: Path) -> None:
    _, first, second = run(tmp_path, [{"keep": ["*.down_proj*"]}])
    kept = [n for n in first.specs if "down_proj" in n]
    assert len(kept) == 2
    assert all(first.bytes_read[n] == second.bytes_read[n] == 0 for n in kept)


def test_a_threshold_over_the_model_costs_whole_further_readings(tmp_path: Path) -> None:
    """`trim=global` must see every delta before the first is merged; it may not read them in part or at random."""
    base, *experts = run(tmp_path, [{"method": "ties", "scope": "all", "options": {"trim": "global"}}])
    times = {c.bytes_read[LARGE] / c.specs[LARGE].nbytes for c in (base, *experts)}
    assert len(times) == 1
    assert times.pop() in (2.0, 3.0, 4.0, 5.0)
