"""Stacks of layers against the same layers put together in memory, for configs that speak of layers by number."""

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import actmat
from actmat.errors import MergeError
from actmat.extras.stack import layers as stack_layers
from actmat.extras.stack.layers import Slice, restacked
from actmat.identity.reading import ConfigReading

pytestmark = pytest.mark.usefixtures("configs_read_here")
SMALL: dict[str, Any] = dict(  # noqa: C408
             vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, sliding_window=8)  # fmt: skip
MIXTURE: dict[str, Any] = dict(  # noqa: C408
               num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
               shared_expert_intermediate_size=8, n_shared_experts=1, n_group=1, topk_group=1, moe_num_experts=4,
               moe_k=2, moe_num_shared_experts=1)  # fmt: skip
MIXED_KINDS = [0, 1, 2, 2, 3, 5]
FULL, LINEAR = ["full_attention"], "linear_attention"
LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type", "attention_layers")

CASES: list[tuple[str, dict[str, Any], list[str], list[int]]] = [
    ("gemma2", {}, ["layer_types"], MIXED_KINDS),
    ("gemma3_text", {"sliding_window_pattern": 3}, ["layer_types"], MIXED_KINDS),
    ("cohere2", {"sliding_window_pattern": 3}, ["layer_types"], MIXED_KINDS),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, ["layer_types"], MIXED_KINDS),
    ("olmo3", {}, ["layer_types"], MIXED_KINDS),
    ("smollm3", {"no_rope_layer_interval": 3}, [], MIXED_KINDS),
    ("smollm3", {"no_rope_layer_interval": 3, "use_sliding_window": True}, [*LISTS[:2]], MIXED_KINDS),
    ("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 8} | MIXTURE,
     ["layer_types", "moe_layers", "no_rope_layers"], MIXED_KINDS),
    ("glm4_moe", {"first_k_dense_replace": 1} | MIXTURE, [], [0, 2, 3, 3]),
    ("qwen3_moe", {"mlp_only_layers": [1, 4]} | MIXTURE, [], MIXED_KINDS),
    ("nemotron_h", {"hybrid_override_pattern": "M*M-*-", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
                    "ssm_state_size": 4, "chunk_size": 4} | MIXTURE, [], MIXED_KINDS),
    ("gpt_neo", {"num_layers": 6, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 3]]},
     [], MIXED_KINDS),
    ("lfm2", {"full_attn_idxs": [1, 4], "block_auto_adjust_ff_dim": False}, ["layer_types"], MIXED_KINDS),
]  # fmt: skip
"""Model type, its entries, entries that older releases did not write, and layers of the stack."""


def stacked_in_memory(model: Any, order: Sequence[int]) -> Any:
    """The model with these of its layers."""
    out = copy.deepcopy(model)
    n = len(model.config.to_dict().get("layers_block_type") or range(model.config.num_hidden_layers))
    name, layers = next(
        (name, m) for name, m in out.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n
    )
    taken = torch.nn.ModuleList(copy.deepcopy(layers[i]) for i in order)
    for i, layer in enumerate(taken):
        for part in layer.modules():
            if getattr(part, "layer_idx", None) is not None:
                part.__dict__["layer_idx"] = i
    setattr(out.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], taken)
    for key in LISTS:
        value = getattr(out.config, key, None)
        if isinstance(value, list) and not isinstance(getattr(type(out.config), key, None), property):
            setattr(out.config, key, [value[i] for i in order])
    out.config.num_hidden_layers = len(order)
    return out


@pytest.mark.parametrize(("kind", "entries", "older", "order"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_stack_is_the_model_with_these_layers(
    tmp_path: Path, kind: str, entries: dict[str, Any], older: list[str], order: list[int]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **(SMALL | entries))
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters():
            p.data = torch.randn_like(p) * 0.2
        model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base/config.json"
    written = {k: v for k, v in json.loads(file.read_text()).items() if k not in older}
    file.write_text(json.dumps(written | ({k: v for k, v in entries.items() if k not in written} if older else {})))
    actmat.merge(" + ".join(f"{tmp_path}/base[{i}:{i + 1}]" for i in order), [], out=tmp_path / "out")
    right = stacked_in_memory(model, order)
    came, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        a, b = (m.eval()(input_ids=ids, use_cache=False).logits for m in (right, came))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("config", "order", "words"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 2}, [0, 2, 1, 3], "'first_k_dense_replace': 2"),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1}, [1, 5], "'attn_layer_period' is 4"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2}, [0, 2], "'decoder_sparse_step' is 2"),
        ({"model_type": "ernie4_5_moe"}, [0, 2], "'moe_layer_interval' is 1"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, [0, 2], "depends on its number"),
        ({"model_type": "gemma3n_text"}, [0, 1, 2], "depends on its number"),
        ({"model_type": "modernbert"}, [3, 4], "layer 0 of modernbert"),
        ({"model_type": "albert"}, [0, 0], "share their weights"),
        ({"model_type": "gemma4_text", "layer_types": ["full_attention", "sliding_attention"] * 3,
          "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, [0, 1],
         "the class of gemma4_text makes it ['full_attention', 'full_attention']"),
        ({"model_type": "own", "global_layer_every_n": 4}, [0, 2], "speak of layers by number"),
    ],
)  # fmt: skip
def test_layers_that_a_config_cannot_say_are_refused(config: dict[str, Any], order: list[int], words: str) -> None:
    """Periods, thresholds and layers that depend on their own place or on other layers."""
    given = {"num_hidden_layers": 6} | config
    _, problems = restacked([Slice(given, i, i + 1) for i in order])
    assert len(problems) == 1
    assert words in problems[0]


@pytest.mark.parametrize(
    ("config", "order", "entries"),
    [
        ({"model_type": "llama"}, [0, 0, 5], {"num_hidden_layers": 3}),
        ({"model_type": "gpt2", "n_layer": 6}, [0, 2], {"n_layer": 2}),
        ({"model_type": "qwen2", "layer_types": FULL * 6}, [0, 2], {"layer_types": FULL * 2}),
        ({"model_type": "kimi_linear"}, [0, 4, 2],
         {"layer_types": [LINEAR, *FULL, LINEAR], "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        ({"model_type": "own", "moe_layers": [1, 4]}, [1, 1, 4, 2], {"moe_layers": [0, 1, 2]}),
        ({"model_type": "own", "layer_kinds": list("abcdef"), "eos_token_id": [1, 2, 3, 4, 5, 6]}, [5, 0],
         {"layer_kinds": ["f", "a"], "eos_token_id": [1, 2, 3, 4, 5, 6]}),
        ({"model_type": "llama", "per_layer_config": {"2": {"head_dim": 8}}}, [2, 0, 2],
         {"per_layer_config": {"0": {"head_dim": 8}, "2": {"head_dim": 8}}}),
    ],
)  # fmt: skip
def test_entries_of_stacks(config: dict[str, Any], order: list[int], entries: dict[str, Any]) -> None:
    given = config if "n_layer" in config else {"num_hidden_layers": 6} | config
    found, problems = restacked([Slice(given, i, i + 1) for i in order])
    assert not problems
    assert {k: found[k] for k in entries} == entries
    assert found.keys() == given.keys() | entries.keys()


def test_without_the_class_layers_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stack_layers, "read_configs", lambda configs: [ConfigReading(obstacle="it is not there")] * len(configs)
    )
    whole = {"model_type": "gemma2", "num_hidden_layers": 6}
    assert restacked([Slice(whole, 0, 6)]) == (whole, [])
    assert restacked([Slice(whole, 0, 3), Slice(whole, 2, 6)])[1] == [
        "config.json: whether its layers depend on their numbers cannot be told: it is not there"
    ]


def test_a_nested_config_is_stacked() -> None:
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 6}}
    found, _ = restacked([Slice(nested, 0, 2), Slice(nested, 4, 6)])
    types = ["sliding_attention"] * 3 + ["full_attention"]
    assert found["text_config"] == {"model_type": "gemma3_text", "num_hidden_layers": 4, "layer_types": types}


@pytest.mark.parametrize(
    ("prefix", "key"),
    [("vision_model.encoder.layers.", "vision_config"), ("model.language_model.layers.", "text_config")],
)
def test_the_nested_config_is_that_of_the_layers(prefix: str, key: str) -> None:
    towers = {"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 3}}
    config = {"model_type": "clip", **towers}
    found, _ = restacked([Slice(config, 0, 3, prefix), Slice(config, 1, 3, prefix)])
    assert found == {**config, key: {"num_hidden_layers": 5}}


def test_a_refused_stack_names_the_config(tmp_path: Path) -> None:
    from tests.helpers.merging import CONFIG, llama_tensors, save_checkpoint

    bound = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    save_checkpoint(tmp_path / "a", llama_tensors(4, seed=1), CONFIG | bound)
    with pytest.raises(MergeError, match="num_kv_shared_layers"):
        actmat.merge(f"{tmp_path}/a[1:3]", [], out=tmp_path / "out")
