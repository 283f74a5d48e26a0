"""Door of mergekit's configurations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from actmat.api.reading import read_recipe
from actmat.errors import MergeError
from actmat.foreign import terminal
from actmat.planning.choose import Chooser
from actmat.recipe import recipe_yaml
from fuzz.doors.folder import in_folder
from fuzz.doors.recipes import YAML
from fuzz.draw import mutated_bytes, mutated_json
from fuzz.harness import Files, door

MODELS: list[dict[str, Any]] = [
    {"model": "org/math", "parameters": {"weight": 0.5, "density": [0.2, {"filter": "mlp", "value": 0.9}, 0.4]}},
    {"model": "org/code+org/lora", "parameters": {"weight": [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 1}]}},
]  # fmt: skip
LAYERS = [{"sources": [{"model": "org/math", "layer_range": [0, 8]}, {"model": "org/base", "layer_range": [0, 8]}]},
          {"sources": [{"model": "org/code", "layer_range": [4, 12], "parameters": {"scale": 0.5}}]}]  # fmt: skip
MERGES = (
    "linear", "slerp", "nuslerp", "task_arithmetic", "ties", "dare_ties", "dare_linear", "della", "della_linear",
    "breadcrumbs", "breadcrumbs_ties", "model_stock", "passthrough", "sce", "karcher", "nearswap", "multislerp", "ram", "x",
)  # fmt: skip
TOP = {
    "base_model": "org/base", "dtype": "bfloat16", "out_dtype": "float16", "tokenizer_source": "union",
    "tokenizer": {"source": "base", "pad_to_multiple_of": 64, "tokens": {"<a>": {"source": "org/math", "force": True}}},
    "chat_template": "auto", "parameters": {"normalize": True, "t": [0, 0.5, 1], "lambda": 0.7, "int8_mask": True},
    "name": "x", "random_seed": 3,
}  # fmt: skip


def _config(rng: random.Random) -> Files:
    given: dict[str, Any] = {"merge_method": rng.choice(MERGES)}
    given |= {k: v for k, v in TOP.items() if k == "base_model" or rng.random() < 0.3}
    given |= rng.choice(({"models": MODELS}, {"slices": LAYERS}, {"modules": {"a": {"models": MODELS}}}))
    if rng.random() < 0.8:
        content = json.dumps(mutated_json(rng, given)).encode()  # JSON is YAML
    else:
        content = yaml.safe_dump(given).encode()
        at = content.find(b": ", rng.randrange(len(content))) + 2
        content = content[:at] + rng.choice(YAML) + content[at:]
    return {"mergekit.yaml": mutated_bytes(rng, content) if rng.random() < 0.2 else content}


def _read(folder: Path) -> str:
    recipe = read_recipe(folder / "mergekit.yaml")
    problems = Chooser(recipe).problems or ["none"]
    return "\n".join(
        [recipe_yaml(recipe), *map(terminal, recipe.notes), str(MergeError("The recipe is not valid.", problems))]
    )


door("mergekit configs", _config, in_folder(_read))
