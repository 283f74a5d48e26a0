"""Adapters of separate projections for a base that packs them, and of packed ones for a base that does not.

Deltas are held against naive sums in float64: `scaling * B A` of every layer, written to its rows one by one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.experts.test_expert_conformance import Lora
from tests.helpers.adapters import save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder, save_lora
from tests.helpers.located import open_expert
from torch import Tensor

import actmat
from actmat.checkpoints.resolve import open_model
from actmat.errors import MergeError
from actmat.extras.conformance.deltas import StoredExpert

ALL = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]}
SOME = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 3}}
PHI = {
    "model_type": "phi3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30,
}  # fmt: skip
"""Of a model with the layers of the tiny Llama, packed."""
PACKINGS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
RUN: dict[str, Any] = {"durable": False, "threads": 1, "compute_dtype": "float64"}
SUM: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}}


def packed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's tensors with q, k, v and gate, up one after the other, as Phi-3 stores them."""
    out = {n: t.clone() for n, t in state.items()}
    for i in range(2):
        for name, parts in PACKINGS.items():
            at = f"model.layers.{i}.{name.partition('.')[0]}."
            rows = [out.pop(f"{at}{part}.weight") for part in parts]
            out[f"model.layers.{i}.{name}.weight"] = torch.cat(rows)
    return out


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(rows: int, columns: int, seed: int, rank: int = 2) -> tuple[Tensor, Tensor]:
    return random(rank, columns, seed=seed), random(rows, rank, seed=seed + 100)


def merged(folder: Path, *experts: Path, out: str = "out", **fields: Any) -> dict[str, Tensor]:
    actmat.merge(folder / "base", list(experts), out=folder / out, **(RUN | SUM | fields))
    return load_file(folder / out / "model.safetensors")


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class TestApartOnPacked(Lora):
    """Separate projections of a Llama, on a base that packs them."""

    family = "llama"
    options: ClassVar = SOME

    def store(self, folder: Path, seed: int) -> StoredExpert:
        place = self.shared / str(seed)
        if not place.exists():
            save_folder(place / "base", packed(tiny("llama").state_dict()), PHI)
            save_folder(place / "tuned", packed(save_adapter(place / "adapter", "llama", seed, **self.options)))
        with open_model(place / "tuned") as tuned:
            return StoredExpert(place / "base", place / "adapter", {n: tuned.tensors.read(n) for n in tuned.specs})


class TestPackedOnSeparate(Lora):
    """Packed projections of Phi-3, on a Llama."""

    family = "llama"

    def store(self, folder: Path, seed: int) -> StoredExpert:
        place = self.shared / str(seed)
        state = {n: t.double() for n, t in tiny("llama").state_dict().items()}
        modules, tuned = {}, dict(state)
        for i in range(2):
            for k, (name, parts) in enumerate(PACKINGS.items()):
                layer = f"model.layers.{i}.{name}"
                names = [f"{layer.rpartition('.')[0]}.{p}.weight" for p in parts]
                a, b = pair(sum(state[n].shape[0] for n in names), 16, seed=10 * seed + 2 * i + k)
                modules[layer] = (a, b)
                start = 0
                for n in names:
                    rows = state[n].shape[0]
                    tuned[n] = state[n] + 2.0 * b[start : start + rows] @ a
                    start += rows
        if not place.exists():
            save_folder(place / "base", state, PHI | {"model_type": "llama"})
            save_lora(place / "adapter", modules)
        return StoredExpert(place / "base", place / "adapter", tuned)


def test_a_base_that_packs_what_an_adapter_trains_apart_is_merged_alike(tmp_path: Path) -> None:
    """Two adapters by every sort of method: the same as the packed models that PEFT makes of them."""
    save_folder(tmp_path / "base", packed(tiny("llama").state_dict()), PHI)
    for n, options in enumerate((ALL, SOME)):
        save_folder(tmp_path / f"m{n}", packed(save_adapter(tmp_path / f"a{n}", "llama", n, **options)))
    for method in ("actmat", "tsv", "ties", "average", "knots"):
        fields = {"method": method, "options": {}}
        found = merged(tmp_path, tmp_path / "a0", tmp_path / "a1", out=f"a-{method}", **fields)
        assert_close(found, merged(tmp_path, tmp_path / "m0", tmp_path / "m1", out=f"m-{method}", **fields))
    plan = actmat.plan(tmp_path / "base", [tmp_path / "a0", tmp_path / "a1"], method="average")
    (note,) = {
        n.partition(": ")[2]
        for n in map(str, plan.notes)
        if "packed in another way" in n and n.startswith("expert 'a0'")
    }
    assert "10 of its modules, such as 'model.layers.0.mlp.gate_proj', are packed in another way" in note


def test_an_adapter_is_written_in_the_layout_of_the_base(tmp_path: Path) -> None:
    """Extracted on the packed base: ranks are sums, and the deltas exact."""
    save_folder(tmp_path / "base", packed(tiny("llama").state_dict()), PHI)
    expected = packed(save_adapter(tmp_path / "a", "llama", 1, **SOME))
    run = RUN | SUM | {"out": tmp_path / "out", "to": "extracted", "ranks": "pattern"}
    actmat.merge(tmp_path / "base", [tmp_path / "a"], **run)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {5, 2}
    assert {t.rpartition(".")[2] for t in config["target_modules"]} == {"qkv_proj", "gate_up_proj"}
    with open_model(tmp_path / "base") as base, open_expert(tmp_path / "out", base) as expert:
        for name, value in expected.items():
            delta = expert.dense(name, 0, value.numel(), torch.float64).view(value.shape)
            torch.testing.assert_close(base.tensors.read(name) + delta, value, rtol=1e-10, atol=1e-10)


def interleaved(parts: Mapping[str, Tensor], order: str, groups: int) -> Tensor:
    """Rows of q, k, v in each of the groups, row by row."""
    rows = []
    for g in range(groups):
        for p in order:
            height = parts[p].shape[0] // groups
            rows += [parts[p][g * height + r] for r in range(height)]
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["gpt_neox", "internlm2", "gpt2", "in_proj_qkvz"])
def test_rows_that_are_interleaved_or_columns_are_those_of_the_layer(kind: str, tmp_path: Path) -> None:
    sizes, config, owner, groups = {
        "gpt_neox": ({"q": 12, "k": 12, "v": 12}, {"num_attention_heads": 3}, "attention.query_key_value", 3),
        "internlm2": (
            {"q": 12, "k": 6, "v": 6},
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3},
            "attention.wqkv",
            2,
        ),
        "gpt2": ({"q": 12, "k": 12, "v": 12}, {"n_head": 3}, "attn.c_attn", 1),
        "in_proj_qkvz": (
            {"q": 4, "k": 4, "v": 8, "z": 8},
            {
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 2,
                "linear_value_head_dim": 2,
            },
            "linear_attn.in_proj_qkvz",
            2,
        ),
    }[kind]  # fmt: skip
    width = 12
    model_type = "qwen3_next" if kind == "in_proj_qkvz" else kind
    layer = f"model.layers.0.{owner}"
    start = {p: random(rows, width, seed=k) for k, (p, rows) in enumerate(sizes.items())}
    turned = kind == "gpt2"
    whole = interleaved(start, "".join(sizes), groups)
    save_folder(
        tmp_path / "base",
        {f"{layer}.weight": whole.T if turned else whole},
        {"model_type": model_type, "hidden_size": width, **config},
    )
    leaves = {
        "gpt_neox": {"query": "q", "key": "k", "value": "v"},
        "internlm2": {"wq": "q", "wv": "v"},
        "gpt2": {"q_proj": "q", "v_proj": "v"},
        "in_proj_qkvz": {"in_proj_qkv": "qkv", "in_proj_z": "z"},
    }[kind]
    modules, tuned = {}, dict(start)
    for n, (leaf, blocks) in enumerate(leaves.items()):
        a, b = pair(sum(sizes[p] for p in blocks), width, seed=10 + n)
        modules[f"{layer.rpartition('.')[0]}.{leaf}"] = (a, b)
        row = 0
        for p in blocks:
            tuned[p] = tuned[p] + 2.0 * b[row : row + sizes[p]] @ a
            row += sizes[p]
    save_lora(tmp_path / "a", modules)
    expected = interleaved(tuned, "".join(sizes), groups)
    found = merged(tmp_path, tmp_path / "a")[f"{layer}.weight"]
    torch.testing.assert_close(found.T if turned else found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_bias_is_put_on_the_same_rows(is_packed: bool, tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn"
    heights = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    weights = {n: random(rows, 16, seed=rows) for n, rows in heights.items()}
    biases = {n: random(rows, seed=rows) for n, rows in heights.items()}
    whole = {"weight": torch.cat([*weights.values()]), "bias": torch.cat([*biases.values()])}
    separate = {f"{layer}.{n}.{k}": t for k, of in (("weight", weights), ("bias", biases)) for n, t in of.items()}
    joined = {f"{layer}.qkv_proj.{k}": t for k, t in whole.items()}
    save_folder(tmp_path / "base", joined if is_packed else separate, PHI)
    if is_packed:
        given = {
            n: (*pair(heights[n], 16, seed=k), random(heights[n], seed=k)) for k, n in enumerate(("q_proj", "v_proj"))
        }
        save_lora(tmp_path / "a", {f"{layer}.{n}": t for n, t in given.items()}, lora_bias=True)
        change = [given.get(n, (torch.zeros(2, 16), torch.zeros(h, 2), torch.zeros(h))) for n, h in heights.items()]
        rows = [2.0 * b.double() @ a.double() for a, b, _ in change]
        expected = {"weight": torch.cat(rows), "bias": torch.cat([2.0 * c.double() for _, _, c in change])}
    else:
        a, b, c = *pair(32, 16, seed=1), random(32, seed=3)
        save_lora(tmp_path / "a", {f"{layer}.qkv_proj": (a, b, c)}, lora_bias=True)
        expected = {"weight": 2.0 * b @ a, "bias": 2.0 * c}
    found = merged(tmp_path, tmp_path / "a", scope="all")
    for k, value in expected.items():
        names = [f"{layer}.qkv_proj.{k}"] if is_packed else [f"{layer}.{n}.{k}" for n in heights]
        delta = torch.cat([found[n] for n in names]) - whole[k]
        torch.testing.assert_close(delta, value, rtol=1e-10, atol=1e-10)


def test_what_transformers_takes_apart_as_it_loads_is_merged_as_it_saves_it(tmp_path: Path) -> None:
    """NomicBert packs q, k, v on disk, and has them apart in memory, where PEFT adapts them."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    torch.manual_seed(0)
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**sizes, vocab_size=30)).double()
    model.save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    assert any(".Wqkv." in n for n in stored)
    assert not any(".q_proj." in n for n in stored)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * random(*parameter.shape, seed=len(name)))
    wrapped.save_pretrained(tmp_path / "a")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "tuned")
    found = merged(tmp_path, tmp_path / "a")
    expected = load_file(tmp_path / "tuned" / "model.safetensors")
    assert any(not torch.equal(expected[n], stored[n]) for n in stored)
    assert_close(found, expected)


def test_rows_that_nothing_tells_apart_are_refused_in_one_sentence(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", packed(tiny("llama").state_dict()))
    save_adapter(tmp_path / "a", "llama", 1, **SOME | {"target_modules": ["q_proj", "v_proj"]})
    with pytest.raises(MergeError) as error:
        actmat.plan(tmp_path / "base", [tmp_path / "a"])
    text = str(error.value)
    assert "4 modules such as 'model.layers.0.self_attn.q_proj' have a delta each" in text
    assert "packs them, as in 'model.layers.0.self_attn.qkv_proj.weight', whose row layout is unknown" in text
    assert "32 rows fit neither thirds of 3 x 16 nor the config's heads" in text
    assert "finds no tensor" not in text


def test_layers_of_other_sizes_and_tensors_trained_in_full_are_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "base", packed(tiny("llama").state_dict()), PHI)
    layer = "model.layers.0.self_attn"
    cases = {
        "rows": ({f"{layer}.k_proj": pair(16, 16, seed=1)}, "does not fit the 8 x 16 of k in"),
        "parts": ({f"{layer}.q_proj": pair(16, 12, seed=1)}, "does not fit the 16 x 16 of q in"),
    }
    for name, (modules, words) in cases.items():
        save_lora(tmp_path / name, modules)
        with pytest.raises(MergeError, match=words):
            actmat.plan(tmp_path / "base", [tmp_path / name])
    folder = save_lora(tmp_path / "full", {f"{layer}.q_proj": pair(16, 16, seed=1)})
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{layer}.q_proj.base_layer.bias"] = torch.zeros(16)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(MergeError, match="is trained in full, and the base packs it with others"):
        actmat.plan(tmp_path / "base", [folder])
    save_lora(tmp_path / "both", {f"{layer}.q_proj": pair(16, 16, seed=1), f"{layer}.qkv_proj": pair(32, 16, seed=2)})
    with pytest.raises(MergeError, match="would be changed by several modules"):
        actmat.plan(tmp_path / "base", [tmp_path / "both"])
    (tmp_path / "llama").mkdir()
    save_folder(tmp_path / "llama" / "base", tiny("llama").state_dict(), PHI)
    save_lora(tmp_path / "odd", {f"{layer}.qkv_proj": pair(30, 16, seed=2)})
    with pytest.raises(MergeError, match=r"which does not fit the 32 x 16 of .*q_proj.weight.*k_proj.weight"):
        actmat.plan(tmp_path / "llama" / "base", [tmp_path / "odd"])


def test_packed_and_separate_layers_are_merged_on_a_base_only(tmp_path: Path) -> None:
    """Into a model, and into an adapter that is extracted; not into an adapter that would hold both layers."""
    save_folder(tmp_path / "base", packed(tiny("llama").state_dict()), PHI)
    first = packed(save_adapter(tmp_path / "a", "llama", 1, **SOME))
    layer = "model.layers.0.self_attn.qkv_proj"
    a, b = pair(32, 16, seed=1)
    save_lora(tmp_path / "b", {layer: (a, b)})
    with pytest.raises(MergeError, match=r"no model has both layers.*--to extracted"):
        actmat.merge(None, [tmp_path / "a", tmp_path / "b"], out=tmp_path / "no", method="linear", **RUN)
    expected = dict(first)
    expected[f"{layer}.weight"] = first[f"{layer}.weight"] + 2.0 * b @ a
    assert_close(merged(tmp_path, tmp_path / "a", tmp_path / "b"), expected)
    run = RUN | SUM | {"out": tmp_path / "lora", "to": "extracted"}
    actmat.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], **run)
    with open_model(tmp_path / "base") as base, open_expert(tmp_path / "lora", base) as expert:
        delta = expert.dense(f"{layer}.weight", 0, 32 * 16, torch.float64).view(32, 16)
        torch.testing.assert_close(
            base.tensors.read(f"{layer}.weight") + delta, expected[f"{layer}.weight"], rtol=1e-10, atol=1e-10
        )
