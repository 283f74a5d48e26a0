"""Entries of a config that speak of layers by number, for models whose layers are put in another order.

Some have an entry per layer (`layer_types`), some list numbers of layers (`mlp_only_layers`), some count the first ones
(`first_k_dense_replace`); periods are refused. A config is read by its class first, which makes the lists that the file
leaves out; the config of a stack is read again, and refused if its class makes other layers of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from actmat.identity.entries import DEPTH_KEYS, LISTED, is_harmless
from actmat.identity.reading import read_configs

_PER_LAYER: Final = re.compile(
    r"layer|^(attention_window|moe_topk|num_experts|intermediate_size|num_attention_heads|num_key_value_heads"
    r"|sliding_windows?|swiglu_limits\w*|indexer_types|activation_sparsity_pattern|hybrid_override_pattern|head_dim"
    r"|moe_intermediate_size|num_shared_expert|attention_types_per_layer|rope_theta|use_rope|no_rope)$"
)
"""Names of keys that may have an entry per layer."""
_NUMBERS: Final = re.compile(
    r"^(moe_layers|mlp_only_layers|full_attn_idxs|attn_layer_indices|cross_attention_layers|rope_scaling_layers"
    r"|global_attn_indexes|window_block_ind(ic|ex)es|subsample_layers|residual_block_indices|dense_layers|sparse_layers)$"
)
"""Keys that list numbers of layers, from 0."""
_BOUND: Final = re.compile(
    r"^(num_kv_shared_layers|kv_source_layers|kv_sharing_modes|hybrid_layer_ids|scale_attn_by_inverse_layer_idx"
    r"|cross_attention_frequency|n_layers_per_attn_res_block|aligner_num_add_layers|num_first_full_attention_layers"
    r"|num_last_full_attention_layers|ple_layer_ids|mtp_local_layer_ids|hidden_size_per_layer_input"
    r"|(attn|expert)_layer_period|moe_layer_interval)$"
)
"""Keys by which a layer depends on others or on its own place: no other order of layers has the same meaning."""
_FIRST: Final = ("first_k_dense_replace", "num_dense_layers")
"""Keys with the number of layers at the start that are of one kind."""
_ON_INDEX: Final = re.compile(
    r"(layer|block|attn|attention|moe|dense|window|rope)\w*_(period|interval|offset|step|freq|frequency|every\w*|pattern"
    r"|idx|idxs|ids|indices|indexes)$|every_n|_interval$"
)
"""Names that look like rules on the number of a layer, for classes that the table does not know."""
_WHOLE: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Lists of layers whose length is the depth of configs without such a number."""
_OWN_FIRST: Final = re.compile(r"^(modernbert|modernbert-decoder|t5|mt5|longt5|switch_transformers|pop2piano|udop)$")
"""Model types whose first layer has other tensors than the others."""
_RESAVE: Final = (
    "Fix: save the config with a current release of transformers, which writes the entries of all layers "
    "(AutoConfig.from_pretrained(MODEL).save_pretrained(MODEL))"
)


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers `start` to `stop - 1` of the model with this config, whose names begin so."""

    config: Mapping[str, Any]
    start: int
    stop: int
    prefix: str = ""


class _CannotStackError(Exception):
    """An entry has no form for the new order of layers."""


def restacked(slices: Sequence[Slice]) -> tuple[dict[str, Any], list[str]]:
    """The config of a stack of layers, from the config of the first slice; and problems.

    >>> old = {"model_type": "gemma2", "num_hidden_layers": 6}
    >>> config, _ = restacked([Slice(old, 0, 3), Slice(old, 2, 6)])
    >>> config["num_hidden_layers"], [t[:4] for t in config["layer_types"]]
    (7, ['slid', 'full', 'slid', 'slid', 'full', 'slid', 'full'])
    """
    try:
        return _ConfigStack(slices).config(), []
    except _CannotStackError as error:
        return dict(slices[0].config), [f"config.json: {error}"]


def without_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its number of layers and the entries for each of them."""
    depth = depth_of(config)
    out = {k: without_layers(v) if isinstance(v, Mapping) else v for k, v in config.items() if k not in DEPTH_KEYS}
    return {k: v for k, v in out.items() if not (_is_list(k, v, depth) or _NUMBERS.search(k))}


def depth_of(config: Mapping[str, Any]) -> int | None:
    """Number of layers, as its entries say it; None if they do not."""
    numbers = [config[k] for k in DEPTH_KEYS if isinstance(config.get(k), int)]
    return next(iter(numbers + [len(config[k]) for k in _WHOLE if isinstance(config.get(k), list | str)]), None)


def _is_list(key: str, value: Any, depth: int | None) -> bool:
    """True for an entry with a value for each layer."""
    if not isinstance(value, list | str) or not value or len(value) != depth or is_harmless(key):
        return False
    return bool(_PER_LAYER.search(key)) and not _NUMBERS.search(key) and (isinstance(value, list) or "pattern" in key)


def _key_of_layers(config: Mapping[str, Any], prefix: str) -> str:
    """Key of the nested config of layers whose names begin so; empty if the config itself has them."""
    inner = [k for k, v in config.items() if isinstance(v, Mapping) and depth_of(v) is not None]
    named = [k for k in inner if k.removesuffix("_config") in prefix]
    texts = [k for k in ("text_config", "llm_config", "language_config") if k in inner]
    return next(iter(named + texts + inner), "") if depth_of(config) is None else ""


class _Part:
    """Entries of one slice's config, as its class reads them."""

    def __init__(self, part: Slice, values: Mapping[str, Any]) -> None:
        self.filled = {k: v for k, v in values.items() if v is not None}
        self.depth, self.layers = depth_of(values), range(part.start, part.stop)

    def is_list(self, key: str) -> bool:
        """True for an entry with a value for each layer."""
        return _is_list(key, self.filled.get(key), self.depth)


class _ConfigStack:
    """Entries of the stack of some slices."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.whole, self.slices, self.prefix = slices[0].config, slices, slices[0].prefix
        self.size = sum(s.stop - s.start for s in slices)

    def config(self) -> dict[str, Any]:
        """The config of the first slice with the entries of the stack."""
        order = [i for s in self.slices for i in range(s.start, s.stop)]
        if order == list(range(depth_of(self.whole) or -1)) and all(s.config == self.whole for s in self.slices):
            return dict(self.whole)
        self._read()
        self._refuse_bound()
        entries = {**dict(self._lists()), **dict(self._numbered()), **dict(self._first_layers())}
        self._refuse_unknown(entries)
        out = {k: self.size if k in DEPTH_KEYS else v for k, v in self.first.items()}
        if depth_of(out) is None:
            out |= {k: self.size for k in DEPTH_KEYS if k in self.lead.filled}
        short = {**out, **{k: v for k, v in entries.items() if out.get(k) is not None}}
        # entries that the class has turned into others, such as a pattern into a list
        turned = [k for k in out if k not in self.lead.filled and (_PER_LAYER.search(k) or _NUMBERS.search(k))]
        full = {**{k: v for k, v in out.items() if k not in turned}, **entries}
        return self._checked([short, full], entries)

    def _read(self) -> None:
        readings = read_configs([s.config for s in self.slices])
        if obstacle := next((r.obstacle for r in readings if r.obstacle), ""):
            raise _CannotStackError(f"whether its layers depend on their numbers cannot be told: {obstacle}")
        values = [r.values or s.config for r, s in zip(readings, self.slices, strict=True)]
        self.is_known = bool(readings[0].release)
        self.name = "" if depth_of(self.whole) is not None else _key_of_layers(values[0], self.prefix)
        self.first: Mapping[str, Any] = self.whole.get(self.name, {}) if self.name else self.whole
        self.parts = [_Part(s, self._of_layers(v)) for s, v in zip(self.slices, values, strict=True)]
        self.lead = self.parts[0]

    def _of_layers(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config or the nested config that has the layers."""
        key = _key_of_layers(values, self.prefix)
        return values[key] if key else values

    def _checked(self, candidates: Sequence[dict[str, Any]], entries: Mapping[str, Any]) -> dict[str, Any]:
        """The first of some configs of which the class makes the layers of the stack."""
        configs = [{**self.whole, self.name: c} if self.name else c for c in candidates]
        if not self.is_known or not entries:
            return configs[-1]
        made: Mapping[str, Any] = {}
        for config, reading in zip(configs, read_configs(configs), strict=True):
            made = self._of_layers(reading.values)
            if all(made.get(key) == value for key, value in entries.items()):
                return config
        key = next(key for key, value in entries.items() if made.get(key) != value)
        raise _CannotStackError(
            f"'{key}' of the stack is {entries[key]}, and the class of {self.whole.get('model_type')} makes it "
            f"{made.get(key)}. Fix: take layers in an order that it keeps"
        )

    @property
    def _layers(self) -> list[tuple[_Part, int]]:
        """Part of each layer of the stack, and its number there."""
        return [(p, i) for p in self.parts for i in p.layers]

    def _lists(self) -> Iterator[tuple[str, Any]]:
        """Entries with a value for each layer."""
        for key in dict.fromkeys(k for p in self.parts for k in p.filled):
            if not any(p.is_list(key) for p in self.parts):
                continue
            if not all(p.is_list(key) and p.layers.stop <= len(p.filled[key]) for p in self.parts):
                raise _CannotStackError(f"'{key}' has an entry for each layer in some of the models only. {_RESAVE}")
            value: Any = [p.filled[key][i] for p, i in self._layers]
            yield key, "".join(value) if isinstance(self.lead.filled[key], str) else value
            if key == "attention_layers":  # GPT-Neo's class expands them from pairs of a list and its repetitions
                yield "attention_types", [[value, 1]]

    def _numbered(self) -> Iterator[tuple[str, Any]]:
        """Lists and mappings of numbers of layers."""
        for key in dict.fromkeys(k for p in self.parts for k in p.filled):
            values = [p.filled.get(key) for p in self.parts]
            if key == "per_layer_config" and any(values):
                of_layers = [_of_layer(p.filled.get(key), i) for p, i in self._layers]
                yield key, {str(n): v for n, v in enumerate(of_layers) if v}
            elif _NUMBERS.search(key) and any(isinstance(v, list) for v in values):
                yield key, [n for n, (p, i) in enumerate(self._layers) if i in (p.filled.get(key) or ())]

    def _first_layers(self) -> Iterator[tuple[str, Any]]:
        """Numbers of layers of one kind at the start, where no list replaces them."""
        filled = self.lead.filled
        listed = {key for name, keys in LISTED.items() if filled.get(name) for key in keys}
        for key in (k for k in _FIRST if filled.get(k) is not None):
            inside = [i < (p.filled.get(key) or 0) for p, i in self._layers]
            count = sum(inside)
            if inside[:count] == [True] * count:
                yield key, count
            elif key not in listed:
                raise _CannotStackError(
                    f"'{key}': {filled[key]} says that only the first layers are dense, and the stack has such layers "
                    "further up, for which the class has no entry. Fix: take them from the start only"
                )

    def _refuse_bound(self) -> None:
        for key in self.lead.filled:
            values = [p.filled.get(key) for p in self.parts]
            is_sparse = key == "decoder_sparse_step" and {*values} != {1}
            if is_sparse or (_BOUND.search(key) and any(values)):
                raise _CannotStackError(
                    f"'{key}' is {self.lead.filled.get(key)}: what a layer computes depends on its number or on other "
                    "layers, so that layers in another order are not those of the model"
                )
        kind = str(self.first.get("model_type") or self.whole.get("model_type"))
        if kind == "albert":
            raise _CannotStackError("ALBERT's layers share their weights: they cannot be stacked")
        if _OWN_FIRST.search(kind) and [n for n, (_, i) in enumerate(self._layers) if i == 0] != [0]:
            raise _CannotStackError(f"layer 0 of {kind} has other tensors than the others. Fix: begin with it")

    def _refuse_unknown(self, done: Collection[str]) -> None:
        if self.is_known:
            return
        for key, value in self.first.items():
            if _ON_INDEX.search(key) and key not in done and value not in (None, 0, 1, False) and not is_harmless(key):
                raise _CannotStackError(
                    f"'{key}' seems to speak of layers by number, and how is not known for model_type "
                    f"'{self.whole.get('model_type')}'. Fix: leave out the stack"
                )


def _of_layer(value: Any, number: int) -> Any:
    return value.get(str(number), value.get(number)) if isinstance(value, Mapping) else None
