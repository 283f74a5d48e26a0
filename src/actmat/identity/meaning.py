"""One form of configs: the value of every key that changes what a model computes, whichever release wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from actmat.checkpoints.side_files import code_files
from actmat.identity.tables import DEPTH_KEYS, LOOSE, TOKEN_IDS, class_of, expand, is_ignored, known_keys

ABSENT: Final = "(absent)"
"""Value of a key that a config does not hold and its class computes from others."""
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
_RENAMED_ROPE = {"su": "longrope", "mrope": "default"}
_OWN_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of RoPE that use the length of the first training."""
_WINDOW = ("sliding_window", "max_window_layers")
NESTED = "components"
_SET_BY_CLASS = {"depth_decoder_config": {"input_size": "hidden_size"}}
"""Nested config -> keys that the class of the whole sets from its own on loading, whatever is written (Moshi)."""
_HEAD = re.compile(
    "(?<=.)(Base|MT|Sparse|VL|Video|Tracker|Text|Vision|Audio|Encoder|Decoder|Backbone|WithLM|LMHead|DoubleHeads"
    "|PreTrained|Model|For(?=[A-Z])).*"
)
"""End of a class's name: its head, or the part of a model that it is."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """Value of a key.

    Args:
        value: as written, or the default of the class.
        kind: `function` if it changes what the model computes, `length`, `token` for ids of tokens, `code` for files of
            code, or `unknown` if no class declares it.
        raw: keys of the file that hold it, to take from one config to another.
        given: whether the file holds it.
        at: keys of the nested config that has it.
    """

    value: Any
    kind: str
    raw: tuple[str, ...]
    given: bool = True
    at: tuple[str, ...] = ()


def meaning(config: Mapping[str, Any], nested: str = "") -> dict[str, ConfigEntry]:
    """Dotted key -> entry, for keys that change outputs and those that no class declares.

    >>> {k: e.value for k, e in meaning({"model_type": "llama", "rope_theta": 5e5}).items() if k.startswith("rope")}
    {'rope_theta': 500000.0, 'rope_type': 'default'}
    """
    declared: Mapping[str, Any] = class_of(config, nested) or {}
    names = declared.get("names", {})
    given = {names.get(k, k): v for k, v in config.items() if k not in names or names[k] not in config}
    keys = {**declared.get("older", {}), **declared.get("keys", {})}
    derived, replaced = declared.get("derived", ()), declared.get("replaced", ())
    stated = {k: v for k, v in given.items() if v is not None or k not in derived}
    filled = {**keys, **dict.fromkeys(replaced), **stated}
    lists = _lists(declared, {**keys, **stated})
    known = keys if declared else known_keys()
    out: dict[str, ConfigEntry] = {}
    for key in dict.fromkeys([*keys, *given]):
        is_token = TOKEN_IDS.search(key) and given.get(key) is not None
        if key in ROPE_KEYS or _is_nested(key, given.get(key), declared):
            continue
        if is_ignored(key) and not is_token and key not in keys:
            continue
        value = lists.get(key, _computed(key, filled, derived, replaced) if declared else given.get(key))
        is_function = key in known and key not in replaced
        kind = "token" if is_token else "length" if LOOSE.search(key) else "function" if is_function else "unknown"
        raw = (key, *(k for k, v in names.items() if v == key))
        out[key] = ConfigEntry(value, kind, raw, key in given)
    if isinstance(named := config.get("architectures"), list) and named and isinstance(named[0], str):
        family = _HEAD.sub("", named[0]) + "*"
        out["architectures"] = ConfigEntry(family, "function", ("architectures",), given=False)
    if files := code_files(config, "AutoModel"):
        out["auto_map"] = ConfigEntry(", ".join(files), "code", ("auto_map",))
    _drop_unused(out, declared)
    for key, value in _rope(given, filled, declared).items():
        out[key if key.startswith("rope_") else f"rope_parameters.{key}"] = ConfigEntry(value, "function", ROPE_KEYS)
    for key, value, kind in _nested_configs(given, declared):
        out |= {f"{key}.{k}": replace(e, at=(key, *e.at)) for k, e in meaning(value, kind).items()}
    return out


def _computed(key: str, filled: Mapping[str, Any], derived: Any, replaced: Any) -> Any:
    """The value of a key, or what its class makes of its absence."""
    value = filled.get(key)
    if value is None and key in replaced:
        return ABSENT
    if value is not None or key not in derived:
        return value
    heads, width = filled.get("num_attention_heads"), filled.get("hidden_size")
    if key == "num_key_value_heads":
        return heads
    if key != "head_dim" or "qk_rope_head_dim" in filled:
        return ABSENT
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads else ABSENT


def _lists(declared: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry per layer that the config leaves to its class."""
    found: dict[str, Any] = {}
    depth = next((n for k in DEPTH_KEYS if isinstance(n := filled.get(k), int)), None)
    for key, rule in declared.get("rules", {}).items():
        if filled.get(key) is None and depth is not None:
            made = expand(rule, {**filled, **found}, depth)
            found[key] = ABSENT if made is None else made
    return found


def _drop_unused(out: dict[str, ConfigEntry], declared: Mapping[str, Any]) -> None:
    """Remove keys that have no effect: those that a list replaces, and windows that no layer uses."""
    for key, rule in declared.get("rules", {}).items():
        if key in out and out[key].value not in (None, ABSENT):
            for name in (rule.get("period"), rule.get("start"), rule.get("if")):
                if isinstance(name, str):
                    out.pop(name, None)
    types = out["layer_types"].value if "layer_types" in out else None
    everywhere_full = isinstance(types, list) and set(map(str, types)) == {"full_attention"}
    if everywhere_full or ("use_sliding_window" in out and not out["use_sliding_window"].value):
        for name in _WINDOW:
            out.pop(name, None)


def _rope(given: Mapping[str, Any], filled: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of rotary embeddings; empty for classes without."""
    if "rope_parameters" not in declared.get("keys", ()) and not any(k in given for k in ROPE_KEYS):
        return {}
    local = given.get("rope_local_base_freq")
    found = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not found and local is None:
        over = {k: given[k] for k in ("rope_theta", "partial_rotary_factor") if given.get(k) is not None}
        found = {**(declared.get("rope") or {}), **over}
    if not isinstance(found, Mapping):
        return {"rope_parameters": found}
    by_type = {k: v for k, v in found.items() if isinstance(v, Mapping)}
    if not by_type and local is not None:  # Gemma 3, before the form by layer types
        by_type = {"full_attention": dict(found), "sliding_attention": {"rope_theta": local}}
    if by_type:
        flat = {t: _flat_rope(v, filled, declared) for t, v in by_type.items()}
        return {f"{k}.{t}": x for t, values in flat.items() for k, x in values.items()}
    return _flat_rope(found, filled, declared)


def _flat_rope(rope: Mapping[str, Any], filled: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in rope.items() if k != "type" and v is not None}
    kind = str(out.get("rope_type", rope.get("type", "default")))
    out["rope_type"] = kind = _RENAMED_ROPE.get(kind, kind)
    theta = filled.get("rope_theta") or declared.get("theta")
    out.setdefault("rope_theta", theta if theta is not None else ABSENT)
    if (share := filled.get("partial_rotary_factor")) is not None:
        out.setdefault("partial_rotary_factor", share)
    if out.get("partial_rotary_factor") == 1:
        del out["partial_rotary_factor"]
    if kind in _OWN_LENGTH:
        length = filled.get("original_max_position_embeddings") or filled.get("max_position_embeddings")
        out.setdefault("original_max_position_embeddings", length)
    return dict(sorted(out.items()))


def _is_nested(key: str, value: Any, declared: Mapping[str, Any]) -> bool:
    if key in declared.get("nested", ()):
        return True
    named = key == NESTED or key.endswith("_config")
    return isinstance(value, Mapping) and (named or "model_type" in value or "_class_name" in value)


def _nested_configs(
    given: Mapping[str, Any], declared: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Key, content and model type of the nested configs that are written."""
    for key, value in given.items():
        is_other = is_ignored(key) or key in ROPE_KEYS
        if isinstance(value, Mapping) and not is_other and _is_nested(key, value, declared):
            own = {k: given[name] for k, name in _SET_BY_CLASS.get(key, {}).items() if k in value and name in given}
            yield key, {**value, **own}, declared.get("nested", {}).get(key, "")


_SYNONYMS = ({"silu", "swish"}, {"gelu", "gelu_python"}, {"gelu_new", "gelu_fast", "gelu_pytorch_tanh"})


def same(a: Any, b: Any) -> bool:
    """True for values that mean the same: numbers up to float32's rounding, tuples as lists, names of activations."""
    if isinstance(a, int | float) and isinstance(b, int | float) and isinstance(a, bool) == isinstance(b, bool):
        return a == b or math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        one, two = ({str(k): v for k, v in x.items()} for x in (a, b))
        return one.keys() == two.keys() and all(same(v, two[k]) for k, v in one.items())
    return bool(a == b) or any({str(a), str(b)} <= names for names in _SYNONYMS)


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Keys with other values, of those that both hold; names of classes and versions are none.

    >>> differing({"a": 1, "b": 2, "_x": 3}, {"a": 1.0, "b": 3, "_x": 4, "c": 5})
    ['b']
    """
    both = (k for k in ours if k in theirs and not re.search(r"^_|_(class|type|version)$", k))
    return [k for k in both if not same(ours[k], theirs[k])]
