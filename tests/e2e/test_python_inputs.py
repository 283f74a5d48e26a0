"""Modules, state dicts, adapters and functions as inputs of `merge`: the bytes are those of saved folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import actmat
from actmat.errors import CheckpointError, MergeError, OutputError, RecipeError
from actmat.methods import MergeMethod, get_method
from actmat.run.automatic import TABLE


def tiny(seed: int, base: nn.Module | None = None, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, **fields
    )
    model = LlamaForCausalLM(config) if base is None else copy.deepcopy(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Any]:
    base = tiny(0)
    found = {"base": base, "a": tiny(1, base), "b": tiny(2, base)}
    for name, model in found.items():
        model.save_pretrained(tmp_path / name)
    return found


def equal(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("method", ["auto", "ties", "dare"])
def test_any_mixture_has_the_bytes_of_saved_folders(models: dict[str, Any], tmp_path: Path, method: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    actmat.merge(tmp_path / "base", [a, b], out=tmp_path / "out", method=method)
    written = load_file(tmp_path / "out" / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    state = models["b"].state_dict()
    named: Any = {"path": models["b"], "name": "coder", "weight": 1.0}
    mixtures: tuple[tuple[Any, list[Any]], ...] = (
        (models["base"], [models["a"], models["b"]]),
        (models["base"].state_dict(), [a, state]),
        (tmp_path / "base", [models["a"], named]),
        (models["base"], [str(a), {"path": state}]),
    )
    for base, experts in mixtures:
        found = actmat.merge(base, experts, method=method)
        assert equal(found.tensors, written)
        assert found.records.keys() == found.plan.by_name.keys()
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    assert [i.action for i in actmat.plan(models["base"], [models["a"], b], method=method).items] == [
        i.action for i in found.plan.items
    ]


def test_a_module_gives_a_module_of_its_own(models: dict[str, Any], tmp_path: Path) -> None:
    base, before = models["base"], copy.deepcopy(models["base"].state_dict())
    merged = actmat.merge(base, [models["a"], models["b"]], method="average")
    found = merged.model
    assert type(found) is LlamaForCausalLM
    assert equal(found.state_dict(), merged.tensors)
    assert equal(base.state_dict(), before)
    assert not {t.data_ptr() for t in found.parameters()} & {t.data_ptr() for t in base.parameters()}
    assert equal(merged.load().model.state_dict(), merged.tensors)
    of_a_path = actmat.merge(tmp_path / "base", [models["a"], models["b"]], method="average")
    assert equal(of_a_path.model.state_dict(), merged.tensors)


def test_ties_hold_in_the_merged_module(tmp_path: Path) -> None:
    base = tiny(0, tie_word_embeddings=True)
    a, b = tiny(1, base), tiny(2, base)
    found: Any = actmat.merge(base, [a, b], method="average", scope="all").model
    assert found.lm_head.weight is found.model.embed_tokens.weight
    for name, model in (("base", base), ("a", a), ("b", b)):
        model.save_pretrained(tmp_path / name)
    actmat.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], out=tmp_path / "o", method="average", scope="all")
    written = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(found.state_dict()[n], t) for n, t in written.items())


def test_modules_without_a_config_and_without_a_base() -> None:
    a: Any
    b: Any
    a, b = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    found = actmat.merge(experts=[a, b], method="average").tensors
    assert torch.equal(found["0.weight"], (a[0].weight + b[0].weight) / 2)
    merged: Any = actmat.merge(a, [b], scale=0.5).model
    torch.testing.assert_close(merged[0].weight, found["0.weight"])


def test_an_output_of_memory_is_written_and_never_taken_for_finished(models: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    base, experts = models["base"], [models["a"], models["b"]]
    found = actmat.merge(base, experts, out=out, method="average", diagnose=True)
    assert found.diagnosis is not None
    loaded = LlamaForCausalLM.from_pretrained(out)
    assert equal(loaded.state_dict(), actmat.merge(base, experts, method="average").tensors)
    with pytest.raises(OutputError, match="exists"):
        actmat.merge(base, [models["b"], models["b"]], out=out, method="average", diagnose=True)


def blend(deltas: list[Tensor], *, towards: float = 0.5) -> Tensor:
    """Between two experts."""
    return towards * deltas[0] + (1 - towards) * deltas[1]


def test_a_function_is_a_method_everywhere(models: dict[str, Any], tmp_path: Path) -> None:
    base, experts = models["base"], [models["a"], models["b"]]
    wanted = actmat.merge(base, experts, method="average").tensors
    for method in (blend, lambda deltas: sum(deltas) / 2, MergeMethod("own", get_method("average").merge, "matrix")):
        found = actmat.merge(base, experts, method=method)
        torch.testing.assert_close(dict(found.tensors), dict(wanted))
    assert actmat.plan(base, experts, method=blend).recipe.method.startswith("blend@")
    ruled = actmat.merge(base, experts, method="ties", rules=[{"match": "*mlp*", "method": blend}]).tensors
    torch.testing.assert_close(ruled["model.layers.0.mlp.up_proj.weight"], wanted["model.layers.0.mlp.up_proj.weight"])
    one = actmat.merge(base, experts, method=blend, options={"towards": 1.0}).tensors
    torch.testing.assert_close(one["model.layers.0.mlp.up_proj.weight"], models["a"].model.layers[0].mlp.up_proj.weight)
    (tmp_path / "own.py").write_text("def blend(deltas, *, towards=0.5):\n    return sum(deltas) / 2\n")
    filed = actmat.merge(base, experts, method=f"{tmp_path}/own.py:blend").tensors
    torch.testing.assert_close(dict(filed), dict(wanted))
    assert actmat.merge(base, experts, method=get_method("average")).plan.recipe.method == "average"
    with pytest.raises(MergeError, match="no option 'towrads'"):
        actmat.merge(base, experts, method=blend, options={"towrads": 1.0})


def test_a_function_that_gives_no_delta_says_so(models: dict[str, Any]) -> None:
    with pytest.raises(MergeError, match=r"expected shape \[16, 16\], found \[16\]"):
        actmat.merge(models["base"], [models["a"], models["b"]], method=lambda deltas: deltas[0][0], threads=1)


def test_matrices_by_auto_from_numpy_by_a_function() -> None:
    torch.manual_seed(0)
    deltas = [torch.randn(8, 6) for _ in range(3)]
    pairs = [(torch.randn(8, 2), torch.randn(2, 6)) for _ in range(3)]
    auto = actmat.merge_matrices("auto", deltas)
    assert torch.equal(auto, actmat.merge_matrices(TABLE["few", "any"].method, deltas))
    assert torch.equal(actmat.merge_matrices("auto", [d.numpy() for d in deltas]), auto)
    assert torch.equal(actmat.merge_matrices("auto", pairs), actmat.merge_matrices("dc_merge", pairs, space="pico"))
    arrays = [(b.numpy(), a.numpy()) for b, a in pairs]
    assert torch.equal(actmat.merge_matrices("auto", arrays), actmat.merge_matrices("auto", pairs))
    assert torch.equal(actmat.merge_matrices("auto", deltas[:1]), deltas[0])
    grams = [np.eye(6, dtype=np.float32)] * 3
    mean = actmat.merge_matrices("average", deltas)
    torch.testing.assert_close(actmat.merge_matrices("auto", deltas, statistics={"gram": grams}), mean)
    torch.testing.assert_close(actmat.merge_matrices(lambda found: sum(found) / 3, deltas), mean)
    with pytest.raises(RecipeError, match="no option 'density'"):
        actmat.merge_matrices("auto", deltas, density=0.3)


@pytest.fixture
def adapted() -> Any:
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    model = get_peft_model(tiny(0), LoraConfig(**config), adapter_name="a")
    model.add_adapter("b", LoraConfig(**config))
    return model


def deltas_of(model: Any, name: str) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    return {n: m.get_delta_weight(name) for n, m in layers.items()}


def test_adapters_are_merged_in_place_as_peft_does(adapted: PeftModel) -> None:
    adapted.add_weighted_adapter(["a", "b"], [0.7, 0.3], "theirs", combination_type="cat")
    merged = actmat.merge_adapters(adapted, ["a", "b"], name="ab", method="linear", weights=[0.7, 0.3])
    torch.testing.assert_close(deltas_of(adapted, "ab"), deltas_of(adapted, "theirs"))
    assert merged.plan.recipe.labels == ("a", "b")
    adapted.add_weighted_adapter(["a", "b"], [1.0, 1.0], "by_factors", combination_type="linear")
    fields: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "space": "factors"}
    actmat.merge_adapters(adapted, ["a", "b"], name="sum", **fields)
    torch.testing.assert_close(deltas_of(adapted, "sum"), deltas_of(adapted, "by_factors"))
    actmat.merge_adapters(adapted, ["a", "b"], name="best")
    adapted.set_adapter("best")
    assert torch.isfinite(adapted(input_ids=torch.tensor([[1, 2]])).logits).all()


def test_names_of_adapters_are_checked(adapted: PeftModel) -> None:
    with pytest.raises(RecipeError, match="no adapter 'c'"):
        actmat.merge_adapters(adapted, ["a", "c"], name="ab")
    with pytest.raises(RecipeError, match="has an adapter 'b' already"):
        actmat.merge_adapters(adapted, ["a", "b"], name="b")
    with pytest.raises(CheckpointError, match="PEFT adapter"):
        actmat.merge(adapted, [tiny(1)])


@pytest.mark.parametrize("onto", [True, False])
def test_an_active_adapter_is_an_expert_like_its_folder(adapted: PeftModel, tmp_path: Path, onto: bool) -> None:
    base = tiny(0) if onto else None
    adapted.save_pretrained(str(tmp_path))
    for name in ("a", "b"):
        adapted.set_adapter(name)
        saved = actmat.merge(base, [tmp_path / name], method="linear", scale=0.5)
        held = actmat.merge(base, [adapted], method="linear", scale=0.5)
        assert equal(held.tensors, saved.tensors)
    assert not onto or type(held.model) is LlamaForCausalLM
