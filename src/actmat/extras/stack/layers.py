"""Entries of a config that speak of layers by number, for models whose layers are put in another order.

Some have an entry per layer (`layer_types`), some list numbers of layers (`mlp_only_layers`), some give a rule on the
number (`first_k_dense_replace`, periods and offsets). Lists that a config leaves to its class follow from the rules of
the generated table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from actmat.identity.tables import DEPTH_KEYS, class_of, expand, is_ignored

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
    r"|num_last_full_attention_layers|ple_layer_ids|mtp_local_layer_ids|hidden_size_per_layer_input)$"
)
"""Keys by which a layer depends on others or on its own place: no other order of layers has the same meaning."""
_FIRST: Final = ("first_k_dense_replace", "num_dense_layers")
"""Keys with the number of layers at the start that are of one kind."""
_PERIODS: Final = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))
_ON_INDEX: Final = re.compile(
    r"(layer|block|attn|attention|moe|dense|window|rope)\w*_(period|interval|offset|step|freq|frequency|every\w*|pattern"
    r"|idx|idxs|ids|indices|indexes)$|every_n|_interval$"
)
"""Names that look like rules on the number of a layer, for classes that the table does not know."""
_WHOLE: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Lists of layers whose length is the depth of configs without such a number."""
_OWN_FIRST: Final = re.compile(r"^(modernbert|modernbert-decoder|t5|mt5|longt5|switch_transformers|pop2piano|udop)$")
"""Model types whose first layer has other tensors than the others."""
_LAST_IS_FULL: Final = ("gemma4", "diffusion_gemma", "embedding_gemma2")
"""Beginnings of model types whose class makes the last layer attend in full, whatever the config says."""
_RESAVE: Final = (
    "Fix: save the config with a current release of transformers, which writes the entries of all layers "
    "(AutoConfig.from_pretrained(MODEL).save_pretrained(MODEL))"
)


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers `start` to `stop - 1` of the model with this config."""

    config: Mapping[str, Any]
    start: int
    stop: int


class _CannotStackError(Exception):
    """An entry has no form for the new order of layers."""


def restacked(slices: Sequence[Slice]) -> tuple[dict[str, Any], list[str]]:
    """The config of a stack of layers, from the config of the first slice; and problems.

    >>> old = {"model_type": "gemma2", "num_hidden_layers": 6}
    >>> config, _ = restacked([Slice(old, 0, 3), Slice(old, 2, 6)])
    >>> config["num_hidden_layers"], [t[:4] for t in config["layer_types"]]
    (7, ['slid', 'full', 'slid', 'slid', 'full', 'slid', 'full'])
    """
    first = slices[0].config
    name = next((k for k in _nested_names(first) if not any(d in first for d in DEPTH_KEYS)), None)
    if name is None:
        parts, kind = list(slices), ""
    else:
        parts = [Slice(s.config.get(name) or {}, s.start, s.stop) for s in slices]
        kind = str((class_of(first) or {}).get("nested", {}).get(name, ""))
    try:
        inner = _ConfigStack(parts, kind).config()
    except _CannotStackError as error:
        return dict(first), [f"config.json: {error}"]
    return (inner if name is None else {**first, name: inner}), []


def without_layers(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The config without its number of layers and the entries for each of them; None for None."""
    if config is None:
        return None
    part = _Part(Slice(config, 0, 0), "")
    found = {k: v for k, v in config.items() if k not in DEPTH_KEYS and not part.is_list(k) and not _NUMBERS.search(k)}
    inner = {k: without_layers(found[k]) for k in _nested_names(config) if isinstance(found.get(k), Mapping)}
    return {**found, **inner}


def _nested_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of nested configs that have a number of layers, that of the text model first."""
    inner = [k for k, v in config.items() if isinstance(v, Mapping) and any(d in v for d in DEPTH_KEYS)]
    nested = (class_of(config) or {}).get("nested", {})
    found = [k for k in ("text_config", "llm_config", "language_config") if k in inner or k in nested]
    yield from dict.fromkeys((*found, *inner))


class _Part:
    """Entries of one slice's config, with the lists that its class computes."""

    def __init__(self, part: Slice, kind: str) -> None:
        self.declared = class_of(part.config, kind)
        declared: Mapping[str, Any] = self.declared or {}
        names = declared.get("names", {})
        self.known = {**declared.get("older", {}), **declared.get("keys", {})}
        given = {names.get(k, k): v for k, v in part.config.items()}
        self.filled = {**self.known, **{k: v for k, v in given.items() if v is not None}}
        depth = next((self.filled[k] for k in DEPTH_KEYS if isinstance(self.filled.get(k), int)), None)
        if depth is None:
            depth = next((len(given[k]) for k in _WHOLE if isinstance(given.get(k), list | str)), None)
        self.names, self.depth, self.given, self.layers = names, depth, given, range(part.start, part.stop)
        self.rules: Mapping[str, Mapping[str, Any]] = declared.get("rules", {})
        for key, rule in self.rules.items():
            if self.filled.get(key) is None and depth is not None and rule:
                self.filled[key] = expand(rule, self.filled, depth)

    def is_list(self, key: str) -> bool:
        """True for an entry with a value for each layer."""
        value = self.filled.get(key)
        if not isinstance(value, list | str) or not value or len(value) != self.depth or is_ignored(key):
            return False
        rule = self.rules.get(key)
        listed = rule is not None or _PER_LAYER.search(key) is not None
        return listed and not _NUMBERS.search(key) and (isinstance(value, list) or "pattern" in key)


class _ConfigStack:
    """Entries of the stack of some slices."""

    def __init__(self, slices: Sequence[Slice], kind: str) -> None:
        self.first = slices[0].config
        self.parts = [_Part(s, kind) for s in slices]
        self.lead = self.parts[0]
        self.size = sum(len(p.layers) for p in self.parts)

    def config(self) -> dict[str, Any]:
        """The config of the first slice with the entries of the stack."""
        out = dict(self.first)
        for key in (k for k in DEPTH_KEYS if k in out):
            out[key] = self.size
        if not any(k in out for k in DEPTH_KEYS) and "num_hidden_layers" in self.lead.known:
            out["num_hidden_layers"] = self.size
        if [i for p in self.parts for i in p.layers] == list(range(self.lead.depth or -1)):
            return out  # all layers of one model in their order
        self._refuse_bound()
        done: set[str] = set()
        for entries in (self._lists(), self._numbered(), self._rules_on_numbers()):
            for key, value in entries:
                done.add(key)
                if value is not None:
                    out[next((k for k in self.first if self.lead.names.get(k) == key), key)] = value
        self._refuse_unknown(done)
        return out

    @property
    def _layers(self) -> list[tuple[_Part, int]]:
        """Part of each layer of the stack, and its number there."""
        return [(p, i) for p in self.parts for i in p.layers]

    def _lists(self) -> Iterator[tuple[str, Any]]:
        """Entries with a value for each layer."""
        keys = dict.fromkeys(k for p in self.parts for k in (*p.rules, *p.filled))
        for key in keys:
            if _NUMBERS.search(key):
                continue
            if not any(p.is_list(key) for p in self.parts):
                if key in self.lead.rules and self.lead.filled.get(key) is None and not self._left_out(key):
                    raise _CannotStackError(
                        f"has no '{key}', which tells the kinds of its layers, and how they follow from other entries "
                        f"is not known. {_RESAVE}"
                    )
                continue
            if not all(p.is_list(key) and p.layers.stop <= len(p.filled[key]) for p in self.parts):
                raise _CannotStackError(f"'{key}' has an entry for each layer in some of the models only. {_RESAVE}")
            value: Any = [p.filled[key][i] for p, i in self._layers]
            value = "".join(value) if isinstance(self.lead.filled[key], str) else value
            yield key, value if self.lead.given.get(key) is not None or value != self._anew(key) else None
            if key == "attention_layers":  # GPT-Neo's class expands them from pairs of a list and its repetitions
                yield "attention_types", [[value, 1]]
            if key == "layer_types" and str(self.first.get("model_type", "")).startswith(_LAST_IS_FULL):
                self._refuse_last(value)

    def _left_out(self, key: str) -> bool:
        """True for a list that the class does not make by itself, or that another entry of the file stands for."""
        others = {"layer_types": ("hybrid_override_pattern", "layers_block_type", "full_attn_idxs")}
        return key not in (self.lead.declared or {}).get("derived", ()) or any(
            self.lead.given.get(o) is not None for o in others.get(key, ())
        )

    def _anew(self, key: str) -> list[Any] | None:
        """The list that the class makes for the stack, if the file has none."""
        rule = self.lead.rules.get(key)
        return expand(rule, self.lead.filled, self.size) if rule else None

    def _refuse_last(self, value: Sequence[Any]) -> None:
        if value[-1] != "full_attention":
            raise _CannotStackError(
                f"the last layer of the stack has '{value[-1]}', and the class of {self.first.get('model_type')} makes "
                "it 'full_attention'. Fix: end with a layer of that kind"
            )

    def _numbered(self) -> Iterator[tuple[str, Any]]:
        """Lists and mappings of numbers of layers."""
        for key in dict.fromkeys(k for p in self.parts for k in p.filled):
            values = [p.filled.get(key) for p in self.parts]
            if key == "per_layer_config" and any(values):
                found = [_of_layer(p.filled.get(key), i) for p, i in self._layers]
                yield key, {str(n): v for n, v in enumerate(found) if v}
            elif _NUMBERS.search(key) and any(isinstance(v, list) for v in values):
                numbers = [n for n, (p, i) in enumerate(self._layers) if i in (p.filled.get(key) or ())]
                yield key, numbers if self.lead.given.get(key) or numbers != self._anew(key) else None

    def _rules_on_numbers(self) -> Iterator[tuple[str, Any]]:
        """Numbers from which the kinds of layers follow, where no list replaces them."""
        listed = {r.get(k) for p in self.parts for r in p.rules.values() for k in ("start", "period", "below", "if")}
        filled = self.lead.filled
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
        for period, offset in (k for k in _PERIODS if filled.get(k[0]) is not None and k[0] not in listed):
            wanted = [i % int(p.filled[period]) == (p.filled.get(offset) or 0) for p, i in self._layers]
            yield from zip((period, offset), _period_of(wanted, filled[period], period), strict=True)
        if filled.get("decoder_sparse_step") not in (None, 1):
            yield "decoder_sparse_step", 1
            yield (
                "mlp_only_layers",
                [
                    n
                    for n, (p, i) in enumerate(self._layers)
                    if i in (p.filled.get("mlp_only_layers") or ()) or (i + 1) % int(p.filled["decoder_sparse_step"])
                ],
            )
        if filled.get("moe_layer_interval") is not None:
            yield from self._between()

    def _between(self) -> Iterator[tuple[str, Any]]:
        """Ernie: mixtures of experts in every n-th layer between two."""

        def is_sparse(p: _Part, i: int) -> bool:
            start, end, every = (p.filled.get(f"moe_layer_{k}") for k in ("start_index", "end_index", "interval"))
            last = (p.depth or 0) - 1 if end in (None, -1) else int(end)
            return (i + 1) % int(every or 1) == 0 and int(start or 0) <= i <= last

        wanted = [is_sparse(p, i) for p, i in self._layers]
        places = [n for n, is_in in enumerate(wanted) if is_in] or [self.size]
        low, high = places[0], places[-1]
        for every in dict.fromkeys((self.lead.filled["moe_layer_interval"], 1)):
            if wanted == [(n + 1) % every == 0 and low <= n <= high for n in range(self.size)]:
                yield from zip(
                    ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
                    (low, high, every),
                    strict=True,
                )
                return
        raise _CannotStackError("the layers with experts are in no order that 'moe_layer_interval' can say")

    def _refuse_bound(self) -> None:
        for key in filter(_BOUND.search, self.lead.filled):
            if any(p.filled.get(key) for p in self.parts):
                raise _CannotStackError(
                    f"'{key}' is {self.lead.filled.get(key)}: what a layer computes depends on its number or on other "
                    "layers, so that layers in another order are not those of the model"
                )
        kind = str(self.first.get("model_type"))
        if kind == "albert":
            raise _CannotStackError("ALBERT's layers share their weights: they cannot be stacked")
        if _OWN_FIRST.search(kind) and [n for n, (_, i) in enumerate(self._layers) if i == 0] != [0]:
            raise _CannotStackError(f"layer 0 of {kind} has other tensors than the others. Fix: begin with it")

    def _refuse_unknown(self, done: set[str]) -> None:
        if self.lead.declared is not None:
            return
        for key, value in self.lead.given.items():
            if _ON_INDEX.search(key) and key not in done and value not in (None, 0, 1, False) and not is_ignored(key):
                raise _CannotStackError(
                    f"'{key}' seems to speak of layers by number, and how is not known for model_type "
                    f"'{self.first.get('model_type')}'. Fix: leave out the stack"
                )


def _of_layer(found: Any, number: int) -> Any:
    return found.get(str(number), found.get(number)) if isinstance(found, Mapping) else None


def _period_of(wanted: Sequence[bool], period: int, key: str) -> tuple[int, int]:
    """Period and offset that give these layers."""
    size = len(wanted)
    for n in dict.fromkeys((period, *range(1, size + 2))):
        for offset in range(n):
            if [i % n == offset for i in range(size)] == list(wanted):
                return n, offset
    places = [i for i, is_in in enumerate(wanted) if is_in]
    raise _CannotStackError(
        f"'{key}' can only say layers at equal distances, and in the stack they are {', '.join(map(str, places))}. "
        "Fix: cut between whole periods"
    )
