"""Planning is linear in the number of tensors."""

import time

import pytest
import torch

from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.experts.stored import StoredDeltas
from actmat.planning import MergePlan, build_plan
from actmat.recipe import make_recipe

CONFIG = {"model_type": "mixtral", "hidden_size": 4, "num_attention_heads": 2, "tie_word_embeddings": False}
PER_LAYER = 4 + 3 * 8 + 3
TEN_THOUSAND = 323


def mixture(layers: int, prefix: str = "") -> Model:
    """A mixture of eight experts per layer, of tiny tensors; an adapted copy may carry a prefix."""
    square, vector = torch.zeros(4, 4), torch.zeros(4)
    tensors = {f"{prefix}model.embed_tokens.weight": torch.zeros(16, 4)}
    for n in range(layers):
        head = f"{prefix}model.layers.{n}"
        tensors |= {f"{head}.self_attn.{p}_proj.weight": square.clone() for p in "qkvo"}
        tensors |= {
            f"{head}.block_sparse_moe.experts.{e}.w{i}.weight": square.clone() for e in range(8) for i in (1, 2, 3)
        }
        tensors[f"{head}.block_sparse_moe.gate.weight"] = torch.zeros(8, 4)
        tensors |= {f"{head}.{p}_layernorm.weight": vector.clone() for p in ("input", "post_attention")}
    tensors[f"{prefix}lm_head.weight"] = torch.zeros(16, 4)
    return hold_model(tensors, config=CONFIG)


def timed(layers: int, prefix: str = "") -> tuple[float, MergePlan]:
    base, expert = mixture(layers), mixture(layers, prefix)
    recipe = make_recipe(
        {
            "base": "b",
            "method": "actmat",
            "experts": ["e1", {"path": "e2"}],
            "rules": [{"match": f"*.layers.{n}.*", "scale": 0.5} for n in range(8)],
            "keep": ["*.gate.weight"],
            "scale": [0.5, 1.0],
        }
    )
    began = time.process_time()
    plan = build_plan(recipe, base, [StoredDeltas(expert)] * 2)
    plan.fingerprint()
    return time.process_time() - began, plan


@pytest.mark.parametrize("prefix", ["", pytest.param("base_model.", marks=pytest.mark.slow)])
def test_ten_thousand_tensors(prefix: str) -> None:
    small, _ = timed(TEN_THOUSAND // 4, prefix)
    seconds, plan = timed(TEN_THOUSAND, prefix)
    assert len(plan.items) == TEN_THOUSAND * PER_LAYER + 2 > 10_000
    assert seconds < 12 * small, "four times the tensors should cost about four times as much, not sixteen"
    assert all(t.reason for t in plan.items)
    assert sum(t.action == "copy" for t in plan.items) == TEN_THOUSAND
