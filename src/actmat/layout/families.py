"""Architecture families whose layouts do not follow from names and shapes, and the towers of a model.

The entries were read from the families' modelling code and hold for their checkpoints on disk. A family without an
entry is decided by names and shapes (`classify.py`, `fused.py`).

A tower (text, vision, audio) has a config and a family of its own: multimodal configs nest one config per tower, and
the head counts that split a packed projection must come from the right one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actmat.checkpoints.model import Config
from actmat.layout import packing
from actmat.layout.packing import GATE_UP, KEY_VALUE, THIRDS, UP_GATE, Packing, Scheme, alternating, first_int
from actmat.layout.types import Orientation


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Exceptions of one family."""

    packed: Mapping[str, Packing | Scheme | str] = field(default_factory=dict)  # of a layer; or why it is one matrix
    transposed: frozenset[str] = frozenset()  # layer names whose weight is stored `I x O` (transformers' `Conv1D`)
    tables: frozenset[str] = frozenset()  # layer names that are embeddings, though their names do not say so
    experts: Orientation = "OI"  # orientation of stacked experts where their shapes do not decide it
    gate_up: Packing | Scheme = GATE_UP  # of `gate_up_proj`


NO_EXCEPTIONS = ModelFamily()
# trained with four-way model parallelism; the four shards are still stored one after the other
_FOUR_SHARDS = Packing((("q", 1), ("v", 1), ("k", 1)), groups=4, words="q, v, k (in each of 4 shards)")
_SHORT_CONVOLUTION = Packing((("B", 1), ("C", 1), ("x", 1)), words="B, C, x of a gated convolution")
_CONV1D = ModelFamily(transposed=frozenset({"c_attn", "c_proj", "c_fc", "q_attn"}))
_STATE_SPACE = ModelFamily(
    packed={
        "in_proj": Packing((("x", 1), ("gate", 1)), words="input, gate (halves)"),
        "x_proj": packing.mamba_parameters,
    }
)
_STATE_SPACE_2 = ModelFamily(packed={"in_proj": packing.mamba2})
_GATED_DELTA = ModelFamily(
    packed={
        "in_proj_qkv": packing.linear_attention,
        "in_proj_qkvz": partial(packing.linear_attention, with_z=True),
        "in_proj_ba": packing.linear_attention_ba,
        "q_proj": packing.query_and_gate,
    }
)

_GROUPS: Mapping[str, ModelFamily] = {
    "gpt2 gpt-sw3 openai-gpt imagegpt decision_transformer clvp_decoder": _CONV1D,
    "jais": ModelFamily(transposed=frozenset({"c_attn", "c_proj", "c_fc", "c_fc2"})),
    "gpt_bigcode": ModelFamily(packed={"c_attn": packing.bigcode}),
    "gpt_neox gpt_neox_japanese bloom persimmon fuyu": ModelFamily(packed={"query_key_value": packing.per_head}),
    "falcon": ModelFamily(packed={"query_key_value": packing.falcon}),
    "RefinedWeb": ModelFamily(packed={"query_key_value": packing.per_kv_group}),
    "RefinedWebModel": ModelFamily(packed={"query_key_value": packing.falcon}),
    "ctrl": ModelFamily(tables=frozenset({"w"})),
    "chatglm": ModelFamily(packed={"query_key_value": packing.grouped_query}),
    "codegen": ModelFamily(packed={"qkv_proj": _FOUR_SHARDS}),
    "minimax": ModelFamily(packed={"qkv_proj": packing.per_head}),
    "deberta": ModelFamily(packed={"in_proj": packing.per_head}),
    "phi3 phi4_multimodal": ModelFamily(packed={"qkv_proj": packing.grouped_query}),
    "phi4_multimodal_audio": ModelFamily(gate_up=UP_GATE),
    "dbrx": ModelFamily(packed={"Wqkv": packing.grouped_query}),
    "mpt modernbert": ModelFamily(packed={"Wqkv": THIRDS}),
    "internlm2": ModelFamily(packed={"wqkv": packing.per_kv_group}),
    "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next": _GATED_DELTA,
    "mamba falcon_mamba jamba": _STATE_SPACE,
    "zamba": ModelFamily(packed={"in_proj": alternating("x", "gate", "input, gate")}),
    "mamba2 falcon_h1 bamba zamba2 nemotron_h granitemoehybrid": _STATE_SPACE_2,
    "jetmoe": ModelFamily(packed={"kv_proj": KEY_VALUE}),
    # the code cuts the value heads into halves, and joins those again as the channels of one value per pair of heads
    "diffllama": ModelFamily(packed={"v_proj": "both halves are channels of the same values"}),
    "hiera": ModelFamily(packed={"qkv": THIRDS}),
    "lfm2 lfm2_moe lfm3 lfm3_text": ModelFamily(packed={"in_proj": _SHORT_CONVOLUTION}),
    # gate and up are columns 0, 2, 4, ... and 1, 3, 5, ... of an E x H x 2F tensor
    "gpt_oss": ModelFamily(experts="IO", gate_up=alternating("gate", "up", "gate, up")),
    # the same alternation, on disk only (w13_weight)
    "inkling_mm_model inkling_text inkling2 inkling2_text": ModelFamily(gate_up=alternating("gate", "up", "gate, up")),
    "llama4 llama4_text aria aria_text qwen3_vl_moe qwen3_vl_moe_text": ModelFamily(experts="IO"),
    # the router is transposed on disk, the experts are separate linear layers
    "ernie4_5_vl_moe ernie4_5_vl_moe_text": ModelFamily(transposed=frozenset({"gate", "weight_1"})),
}
FAMILIES = {model_type: family for names, family in _GROUPS.items() for model_type in names.split()}
"""`model_type` -> its exceptions."""

_TIED_BY_DEFAULT = """
albert bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small blip blip_text_model
bloom camembert cohere cohere2 cohere2_moe convbert cpmant ctrl data2vec-text deberta deberta-v2 distilbert electra
ernie ernie4_5 ernie4_5_moe falcon falcon_mamba flaubert flava florence2 fnet funnel gemma gemma2 gemma3 gemma3_text
gemma3n gemma3n_text gemma4 gemma4_text gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_speech
granite_swa ibert internvl janus jetmoe kosmos-2 layoutlm led lfm2 lfm2_moe lfm2_vl longformer longt5 luke lxmert
m2m_100 mamba marian mbart megatron-bert minicpm3 mistral3 mobilebert modernbert modernbert-decoder moonshine mpnet
mpt mra mvp nllb-moe nomic_bert nystromformer openai-gpt opt ovis2 paligemma pegasus pegasus_x plbart pop2piano
prophetnet recurrent_gemma roberta roberta-prelayernorm roc_bert roformer smollm3 speech_to_text squeezebert
starcoder2 switch_transformers t5 t5gemma t5gemma2 tapas trocr udop vaultgemma vilt visual_bert voxtral_realtime
whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso youtu zamba zamba2
"""
TIED_BY_DEFAULT = frozenset(_TIED_BY_DEFAULT.split())
"""Families whose output head shares the token embedding where their config does not mention `tie_word_embeddings`."""


def recognize(config: Config | None) -> str | None:
    """The `model_type` of a config, or None."""
    model_type = (config or {}).get("model_type")
    return model_type if isinstance(model_type, str) and model_type else None


_TEXT_KEYS = ("text_config", "llm_config", "language_config", "decoder")
_TOWERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vision_config", re.compile(r"(?:^|\.)(?:visual|vision\w*|image_encoder|vit)\.")),
    ("audio_config", re.compile(r"(?:^|\.)(?:audio\w*|speech_encoder)\.")),
)


@dataclass(frozen=True, slots=True)
class Tower:
    """One tower of a model."""

    config: Config  # its config, completed by the entries of the enclosing config
    family: ModelFamily = NO_EXCEPTIONS  # the exceptions of its family (none for a family without an entry)
    listed: bool = False  # True if `FAMILIES` has an entry, so that `family` is complete

    @property
    def hidden(self) -> int | None:
        """Width of the residual stream, if the config has it."""
        return first_int(self.config, "hidden_size", "d_model", "n_embd")


class Towers:
    """The towers of a model, looked up by tensor name."""

    def __init__(self, config: Config | None) -> None:
        top: Config = config or {}
        self._text = _tower(top, text_config_of(top))
        self._others = [
            (pattern, _tower({}, sub)) for key, pattern in _TOWERS if isinstance(sub := _nested(top, key), Mapping)
        ]

    def of(self, name: str) -> Tower:
        """The tower of the tensor `name`."""
        return next((tower for pattern, tower in self._others if pattern.search(name)), self._text)


def text_config_of(config: Config) -> Config | None:
    """The nested config of the language model, if there is one."""
    return next((sub for key in _TEXT_KEYS if isinstance(sub := _nested(config, key), Mapping)), None)


def _nested(config: Config, key: str) -> Any:
    """`config[key]`, also below the `thinker_config` of the omni models."""
    if key in config:
        return config[key]
    thinker = config.get("thinker_config")
    return thinker.get(key) if isinstance(thinker, Mapping) else None


def _tower(outer: Config, inner: Config | None) -> Tower:
    for config in (inner, outer):
        family = FAMILIES.get(recognize(config) or "")
        if family is not None:
            return Tower({**outer, **(inner or {})}, family, listed=True)
    return Tower({**outer, **(inner or {})})
