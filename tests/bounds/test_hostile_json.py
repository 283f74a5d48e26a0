"""Hostile values in every JSON file that comes with a model: read, or refused by name, and never a bug.

Each key of each file in turn gets values of other kinds: lists, objects, numbers of 4,000 digits, numbers that are not
finite, deep nesting.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.merging import CONFIG, Family, actmat

DIGITS = 10**4000


def nested(depth: int, kind: str) -> Any:
    out: Any = 1
    for _ in range(depth):
        out = [out] if kind == "list" else {"a": out}
    return out


VALUES: tuple[Any, ...] = (
    [], [1], [[[]]], {}, {"a": 1}, DIGITS, -DIGITS, 10**90, -(10**90), 2**63, 0, -1, 0.5, float("inf"), float("nan"),
    1e308, "x", "", None, True, ["a", 5, None], nested(90, "list"), nested(90, "object"), nested(120, "list"),
)  # fmt: skip
PER_KEY = 2
"""Values of each key, so that all doors take seconds; other keys get the others."""
MODEL = {
    **CONFIG, "num_hidden_layers": 2, "torch_dtype": "float32", "auto_map": {"AutoModel": "m.M"}, "head_dim": 4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4, "layer_types": ["full_attention"] * 2,
    "id2label": {"0": "A", "1": "B"}, "text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 8},
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "num_experts": 4, "sliding_window": 5, "eos_token_id": [1], "rms_norm_eps": 1e-6,
}  # fmt: skip
LORA = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q.*": 4},
    "target_modules": ["q_proj"], "bias": "none", "use_rslora": False, "fan_in_fan_out": False, "use_dora": False,
    "modules_to_save": [], "base_model_name_or_path": "org/base", "layers_to_transform": [0], "layers_pattern": "l",
    "layer_replication": [[0, 2]], "task_type": "CAUSAL_LM", "target_parameters": ["x"], "trainable_token_indices": [1],
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
}  # fmt: skip
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 2, "content": "<x>", "special": True}],
}
SETTINGS = {"added_tokens_decoder": {"0": {"content": "<x>"}}, "chat_template": "x", "eos_token": {"content": "x"}}
DOORS: dict[str, tuple[str, str, Any, str]] = {
    "base config": ("base", "config.json", MODEL, "plan"),
    "expert config": ("expert0", "config.json", MODEL, "plan"),
    "adapter on a base": ("adapter", "adapter_config.json", LORA, "plan adapter"),
    "adapters": ("adapter", "adapter_config.json", LORA, "plan adapters"),
    "index": ("base", "model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "x.safetensors"}}, "plan"),
    "tokenizer": ("expert0", "tokenizer.json", TOKENIZER, "plan"),
    "tokenizer settings": ("base", "tokenizer_config.json", SETTINGS, "merge"),
    "generation": ("base", "generation_config.json", {"eos_token_id": [1], "temperature": 1.0}, "merge"),
    "modules": ("base", "modules.json", [{"idx": 0, "name": "0", "path": "1_Pooling", "type": "x"}], "merge"),
    "pipeline": ("base", "model_index.json", {"_class_name": "X", "unet": ["diffusers", "X"]}, "plan"),
    "manifest": ("out", "actmat_manifest.json", None, "verify"),
    "report": ("out", "report.json", None, "compare"),
}  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and first elements of a JSON value, nested ones too."""
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in itertools.islice(inner, 40):
        yield from places(part, (*above, key))


def changed(value: Any, place: tuple[Any, ...], to: Any) -> Any:
    if not place:
        return to
    out = copy.deepcopy(value)
    inner = out
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = to
    return out


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("doors")
    made = Family.make(root, layers=1)
    for name in ("adapter", "other"):
        (root / name).mkdir()
        stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        factors = {f"{stem}A.weight": torch.ones(2, 8), f"{stem}B.weight": torch.ones(8, 2)}
        save_file(factors, root / name / "adapter_model.safetensors")
        plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
        (root / name / "adapter_config.json").write_text(json.dumps(plain))
    assert actmat(made.argv("--method", "average", "--diagnose")).code == 0
    return made


def commands(family: Family, kind: str) -> list[str]:
    adapter, other, out = (str(family.root / n) for n in ("adapter", "other", "out"))
    return {
        "plan": family.argv("--method", "average", command="plan"),
        "plan adapter": ["plan", "--base", str(family.base), "--expert", adapter],
        "plan adapters": ["plan", "--expert", adapter, "--expert", other],
        "merge": family.argv("--method", "average", "--out", str(family.root / "again"), "--overwrite"),
        "verify": ["verify", out],
        "compare": ["compare", out, out],
    }[kind]


@pytest.mark.parametrize("door", DOORS)
def test_a_hostile_value_is_read_or_refused(family: Family, door: str) -> None:
    folder, name, value, kind = DOORS[door]
    file = family.root / folder / name
    before = file.read_bytes() if file.exists() else None
    if value is None:
        assert before is not None
        value = json.loads(before)
        value = {k: v[:1] if isinstance(v, list) else v for k, v in value.items()}
    argv, values, failures = commands(family, kind), itertools.cycle(VALUES), []
    try:
        for place in places(value):
            for to in itertools.islice(values, PER_KEY):
                file.write_text(json.dumps(changed(value, place, to)))
                done = actmat(argv)
                if done.code not in (0, 1) or "Traceback" in done.err:
                    failures.append((place, str(to)[:40], done.code, done.err[:300]))
    finally:
        file.unlink() if before is None else file.write_bytes(before)
    assert not failures, failures[:5]


TEXTS = ("[1]", "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '{"r": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("door", [d for d in DOORS if not d.startswith(("tokenizer", "generation", "adapter on"))])
def test_a_text_that_is_not_read_is_refused(family: Family, door: str) -> None:
    folder, name, _, kind = DOORS[door]
    file = family.root / folder / name
    before = file.read_bytes() if file.exists() else None
    for text in TEXTS:
        file.write_text(text)
        done = actmat(commands(family, kind))
        assert done.code == 1, (text[:20], done)
        assert file.name in done.err
    file.unlink() if before is None else file.write_bytes(before)
