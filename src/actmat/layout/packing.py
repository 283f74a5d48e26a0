"""Packings of several linear maps in the rows of one tensor.

All known packings have one form: the rows are divided into `groups` equal groups (heads, or 1), and each group holds
the parts in order, part `p` taking `size_p` units of rows. Thirds, grouped queries, heads interleaved as in GPT-NeoX
and the alternating gate and up of GPT-OSS differ only in these numbers.

A *scheme* makes a `Packing` from the number of rows and the config, or returns the reason why it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from actmat.checkpoints.model import Config
from actmat.layout.types import Block


@dataclass(frozen=True, slots=True)
class Packing:
    """`groups` equal groups of rows, each holding the `parts` (name, size in units) in order."""

    parts: tuple[tuple[str, int], ...]  # names and relative sizes
    groups: int = 1  # number of equal groups
    # rows per unit if the config gives them, to be checked against the shape; None: any number that divides
    unit: int | None = None
    words: str = ""  # its description in a reason

    def blocks(self, rows: int) -> tuple[Block, ...] | None:
        """The blocks of a tensor with this many rows, or None if the packing does not fit them."""
        per_group = sum(size for _, size in self.parts)
        unit, rest = divmod(rows, self.groups * per_group)
        if rest or unit == 0 or (self.unit is not None and self.unit != unit):
            return None
        ends = [unit * end for end in accumulate((size for _, size in self.parts), initial=0)]
        named = zip(self.parts, ends, ends[1:], strict=False)
        return tuple(Block(name, start, stop, self.groups) for (name, _), start, stop in named)


@dataclass(frozen=True, slots=True)
class Attention:
    """Head counts and head size of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


def first_int(config: Config, *keys: str) -> int | None:
    """The first of these entries that is a positive integer."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def attention_of(config: Config) -> Attention | None:
    """Heads, key/value heads and head size under the names that configs use; None if they are missing."""
    heads = first_int(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
    hidden = first_int(config, "hidden_size", "n_embd", "d_model", "n_embed", "embed_dim")
    if heads is None:
        return None
    derived = hidden // heads if hidden is not None and hidden % heads == 0 else None
    head_dim = first_int(config, "head_dim", "kv_channels", "d_kv") or derived
    if head_dim is None:
        return None
    nested = config.get("attn_config")
    kv_heads = first_int(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    if kv_heads is None and isinstance(nested, Mapping):
        kv_heads = first_int(nested, "kv_n_heads")
    return Attention(heads, kv_heads or heads, head_dim)


Scheme = Callable[[int, Config], Packing | str]

GATE_UP = Packing((("gate", 1), ("up", 1)), words="gate, up (halves)")
UP_GATE = Packing((("up", 1), ("gate", 1)), words="up, gate (halves)")
THIRDS = Packing((("q", 1), ("k", 1), ("v", 1)), words="q, k, v (thirds)")
KEY_VALUE = Packing((("k", 1), ("v", 1)), words="k, v (halves)")


def _by_heads(make: Callable[[Attention], Packing | str]) -> Scheme:
    """A scheme that depends on the head counts."""

    def scheme(rows: int, config: Config) -> Packing | str:
        attention = attention_of(config)
        return "the config does not tell the number of heads" if attention is None else make(attention)

    return scheme


def alternating(first: str, second: str, words: str) -> Scheme:
    """A scheme of two maps whose rows alternate."""
    words = f"{words} (alternating rows)"
    return lambda rows, config: Packing(((first, 1), (second, 1)), groups=max(rows // 2, 1), unit=1, words=words)


@_by_heads
def grouped_query(a: Attention) -> Packing | str:
    """q of all heads, then k and v of fewer."""
    parts = (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads))
    return Packing(parts, unit=a.head_dim, words=f"q, k, v ({a.heads} query and {a.kv_heads} key/value heads)")


@_by_heads
def per_head(a: Attention) -> Packing | str:
    """q, k, v of each head."""
    parts = (("q", 1), ("k", 1), ("v", 1))
    return Packing(parts, groups=a.heads, unit=a.head_dim, words=f"q, k, v (interleaved in each of {a.heads} heads)")


@_by_heads
def per_kv_group(a: Attention) -> Packing | str:
    """q, k, v of each group of heads with one key and value."""
    if a.heads % a.kv_heads:
        return f"{a.heads} query heads do not divide into {a.kv_heads} key/value groups"
    words = f"q, k, v ({a.heads // a.kv_heads} query heads, key, value in each of {a.kv_heads} groups)"
    return Packing((("q", a.heads // a.kv_heads), ("k", 1), ("v", 1)), groups=a.kv_heads, unit=a.head_dim, words=words)


@_by_heads
def multi_query(a: Attention) -> Packing | str:
    """q of all heads, then one k and v."""
    return Packing((("q", a.heads), ("k", 1), ("v", 1)), unit=a.head_dim, words=f"q, k, v ({a.heads} heads, one key)")


def bigcode(rows: int, config: Config) -> Packing | str:
    """Packing of GPT-BigCode."""
    return (multi_query if config.get("multi_query", True) else per_head)(rows, config)


def falcon(rows: int, config: Config) -> Packing | str:
    """Packing of Falcon."""
    return (per_kv_group if config.get("new_decoder_architecture", False) else bigcode)(rows, config)


def linear_attention(rows: int, config: Config, with_z: bool = False) -> Packing | str:
    """Rows of the key heads, with the key and value rows that belong to each of them."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads, value_heads, key, value_dim = (first_int(config, f"linear_{name}") for name in names)
    if heads is None or value_heads is None or key is None or value_dim is None:
        return "the config does not tell the heads of the linear attention"
    value = value_heads // heads * value_dim
    if not with_z:
        return Packing((("q", heads * key), ("k", heads * key), ("v", heads * value)), unit=1, words="q, k, v")
    parts = (("q", key), ("k", key), ("v", value), ("z", value))
    return Packing(parts, groups=heads, unit=1, words=f"q, k, v, z (interleaved in each of {heads} key heads)")


def linear_attention_ba(rows: int, config: Config) -> Packing | str:
    """Write strengths (beta) and decays of the value heads, interleaved per key head."""
    key_heads, value_heads = (first_int(config, f"linear_num_{name}_heads") for name in ("key", "value"))
    if key_heads is None or value_heads is None or value_heads % key_heads:
        return "the config does not tell the heads of the linear attention"
    each = value_heads // key_heads
    words = f"beta, decay (interleaved in each of {key_heads} key heads)"
    return Packing((("beta", each), ("decay", each)), groups=key_heads, unit=1, words=words)


def hyper_connection(rows: int, config: Config) -> Packing | str:
    """Maps that read `N` residual streams into one, write one to `N`, and mix `N` with `N`, of `N`, `N`, `N^2` rows.

    Source: D. Zhu et al., "Hyper-Connections", ICLR 2025; transformers, `modeling_deepseek_v4.py`.
    """
    streams = first_int(config, "hc_mult")
    if streams is None:
        return "the config does not tell the number of residual streams"
    parts = (("pre", streams), ("post", streams), ("mix", streams * streams))
    return Packing(parts, unit=1, words=f"pre, post, mix of a hyper-connection of {streams} streams")


def mamba_parameters(rows: int, config: Config) -> Packing | str:
    """Step sizes, B and C of a state-space layer, all from its input (`x_proj`)."""
    rank = first_int(config, "time_step_rank", "mamba_dt_rank")
    state = first_int(config, "state_size", "mamba_d_state")
    if rank is None or state is None:
        return "the config does not tell the rank of the step sizes or the size of the state"
    return Packing((("dt", rank), ("B", state), ("C", state)), unit=1, words="step sizes, B, C")


def mamba2(rows: int, config: Config) -> Packing | str:
    """Gate, input, B, C and step sizes of a Mamba-2 mixer."""
    heads = first_int(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    state = first_int(config, "state_size", "mamba_d_state", "ssm_state_size")
    groups = first_int(config, "n_groups", "mamba_n_groups", "mamba_ngroups")
    if heads is None or state is None or groups is None:
        return "the config does not tell heads, groups and state of the state-space mixer"
    inner, rest = divmod(rows - heads - 2 * groups * state, 2)
    if rest or inner <= 0:
        return f"{heads} heads and {groups} groups of a state of {state} do not fit its {rows} rows"
    parts = (("gate", inner), ("x", inner), ("B", groups * state), ("C", groups * state), ("dt", heads))
    return Packing(parts, unit=1, words="gate, input, B, C, step sizes")


@_by_heads
def query_and_gate(a: Attention) -> Packing | str:
    """q and a gate of each head."""
    parts = (("q", 1), ("gate", 1))
    return Packing(
        parts, groups=a.heads, unit=a.head_dim, words=f"query, gate (interleaved in each of {a.heads} heads)"
    )
