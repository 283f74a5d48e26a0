"""Layout of linear maps: their orientation, and the maps packed in the rows of one tensor or stacked in three axes.

The family decides where it has an entry, else name and shape together: three times as many rows as columns under a
name like `qkv`, or twice as many rows as the partner layer (`down_proj` for `gate_up_proj`) has inputs. Where the
shape does not fit the name, the tensor stays one matrix, and the reason says so.

Libraries stack the experts of a mixture differently: Mixtral-like modules hold `E x 2F x H` and `E x H x F`, GPT-OSS
and Llama 4 the transposes, and Qwen3-VL-MoE transposes when it saves. The pair of shapes decides. With
`gate_up (E, a, b)` and `down (E, c, d)`, `OI` means `a = 2d, b = c` and `IO` means `a = d, b = 2c`: never both.

Shapes: `O` out_features, `I` in_features, `E` experts, `H` hidden size, `F` width of a gated layer or an expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from actmat.layout.families import Tower
from actmat.layout.modulation import PARTNERS_OF_BRANCHES
from actmat.layout.packing import KEY_VALUE, THIRDS, Packing, attention_of, first_int, grouped_query, hyper_connection
from actmat.layout.types import Orientation, Role, TensorLayout

Shape = tuple[int, ...]

GATED: Mapping[str, str] = {
    "gate_up_proj": "down_proj",
    "gate_and_up_projs": "down_projs",
    "w13_weight": "w2_weight",
    "input_linear": "output_linear",
    "Wi": "Wo",
    "wi": "wo",
    "fc1": "fc2",
    "linear_fc1": "linear_fc2",
    "dense_h_to_4h": "dense_4h_to_h",
    "weights_in": "weights_out",
    "w12": "w3",
    "ff_proj": "ff_out",
}
"""Layer that may hold a gate and an up projection -> the layer that reads their product."""

GATE_FIRST = frozenset(
    {"gate_up_proj", "gate_and_up_projs", "w13_weight", "input_linear", "Wi", "weights_in", "dense_h_to_4h"}
)

FEED_FORWARD = (".net.0.proj.weight", ".net.2.weight")
"""Ends of the names of a feed-forward block's layers in diffusers and in the LDM code: gated if the first is twice as
high as the second is wide."""

PARTNERS: Mapping[str, tuple[str, ...]] = {
    **{up: (down,) for up, down in GATED.items()},
    **{down: (up,) for up, down in GATED.items()},
    "down_proj": ("gate_up_proj", "up_proj"),
    "up_proj": ("down_proj",),
    "gate_proj": ("down_proj",),
    "c_attn": ("c_proj",),
    "q_attn": ("c_attn",),
    "c_proj": ("c_attn", "c_fc"),
    "c_fc": ("c_proj",),
    **PARTNERS_OF_BRANCHES,
}
"""Layer name -> names of its partner: the neighboring layer whose shape decides where its own is ambiguous."""

QKV = frozenset(
    {"qkv", "qkv_proj", "Wqkv", "wqkv", "w_qkv", "W_pack", "to_qkv", "att_proj", "c_attn", "in_proj_weight"}
)
GPT2_NAMES = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})
TRANSPOSED_PARAMETER = re.compile(r"proj|(?:\w+_)?projection|mm_input_projection_weight")
RECURRENT = re.compile(r"weight_(ih|hh)_l\d+(?:_reverse)?")
HYPER_CONNECTION = re.compile(r"(?:hc_(?:\w+_)?)?fn")
"""Bare parameters of hyper-connections: `hc_attn_fn` of DeepSeek-V4 on disk, `attn_hc.fn` in memory."""
GATES = {4: ("i", "f", "g", "o"), 3: ("r", "z", "n")}

WHOLE: Mapping[str, str] = {
    "query_key_value": "packs q, k, v per head or in thirds, and no config of a known family says which",
    "kv_a_proj_with_mqa": "the latent and the shared rotary key of multi-head latent attention",
    "kv_b_proj": "keys and values of multi-head latent attention, unpacked from one latent",
    "kv_proj": "keys and values together",
}
"""Packed layers that stay one matrix, and why."""


def linear_layout(owner: str, parameter: bool, shape: Shape, partner: Shape | None, tower: Tower) -> TensorLayout:
    """Layout of a 2-D weight that is one or several linear maps.

    `owner` is the name of the layer (`qkv_proj`), or of a bare parameter (`in_proj_weight`, with `parameter` True);
    `partner` is the stored shape of its partner layer (`PARTNERS`), if there is one.
    """
    orientation, how = _orientation(owner, parameter, shape, partner, tower)
    rows, cols = shape if orientation == "OI" else shape[::-1]
    packing = _packing(owner, rows, cols, partner, tower)
    last = re.split(r"_\d+_", owner)[-1] if owner.startswith(("lora_", "lycoris_")) else owner  # kohya's whole name
    why = f"{how}name ends in {last}"
    if isinstance(packing, Packing):
        if (blocks := packing.blocks(rows)) is not None:
            return TensorLayout(Role.FUSED_LINEAR, f"packed {packing.words}, {rows} rows, {why}", orientation, blocks)
        expected = packing.words + (f" of {packing.unit} rows each" if packing.unit else "")
        packing = f"{expected} do not fit its {rows} rows"
    whole = f" left whole: {packing};" if packing else ","
    return TensorLayout(Role.LINEAR, f"linear layer{whole} {why}", orientation)


def _packing(owner: str, rows: int, cols: int, partner: Shape | None, tower: Tower) -> Packing | str | None:
    """The packing, a reason to leave a packed layer whole, or None for a layer that packs nothing."""
    if owner in tower.family.packed:
        packed = tower.family.packed[owner]
        return packed(rows, tower.config) if callable(packed) else packed
    if owner in WHOLE:
        return WHOLE[owner]
    if owner in QKV:
        return _attention_packing(owner, rows, cols, tower)
    if HYPER_CONNECTION.fullmatch(owner):
        is_head = rows == first_int(tower.config, "hc_mult")  # reads all streams into one: a single map
        return None if is_head else hyper_connection(rows, tower.config)
    if owner == "to_kv":
        return KEY_VALUE
    if RECURRENT.fullmatch(owner):
        return _recurrent_packing(rows, cols if "_hh_" in owner else partner)
    if owner == "proj" and partner is not None and len(partner) == 2 and rows == 2 * partner[1]:
        return Packing((("value", 1), ("gate", 1)), words="value, gate (halves)")
    if owner in GATED and partner is not None and len(partner) == 2:
        width = partner[1]  # the inputs of down_proj
        if rows == 2 * width:
            return _gate_and_up(owner, rows, tower)
        if owner == "gate_up_proj":
            return f"its {rows} rows are not twice the {width} inputs of {GATED[owner]}"
    elif owner == "gate_up_proj":
        return _gate_and_up(owner, rows, tower)
    return None


def _gate_and_up(owner: str, rows: int, tower: Tower) -> Packing | str:
    """The two halves of a gated layer's input projection, called gate and up where their order is known."""
    if owner in GATE_FIRST:
        packed = tower.family.gate_up
        return packed(rows, tower.config) if callable(packed) else packed
    return Packing((("first", 1), ("second", 1)), words="halves of a gated layer")


def _attention_packing(owner: str, rows: int, cols: int, tower: Tower) -> Packing | str:
    if owner != "in_proj_weight" and attention_of(tower.config) is not None:
        packing = grouped_query(rows, tower.config)
        if isinstance(packing, Packing) and packing.blocks(rows) is not None:
            return packing
    if rows == 3 * cols:
        return THIRDS
    if owner == "c_attn" and rows == 2 * cols:
        return Packing((("k", 1), ("v", 1)), words="k, v of cross-attention (halves)")
    return f"{rows} rows fit neither thirds of 3 x {cols} nor the config's heads"


def _recurrent_packing(rows: int, state: int | Shape | None) -> Packing | str | None:
    """Gates of `nn.LSTM` and `nn.GRU`; the hidden size is the number of columns of `weight_hh`."""
    hidden = state[1] if isinstance(state, tuple) and len(state) == 2 else state
    if not isinstance(hidden, int) or rows % hidden or rows // hidden not in (1, *GATES):
        return "the gates of a recurrent layer do not divide its rows"
    gates = GATES.get(rows // hidden)
    if gates is None:
        return None  # a plain nn.RNN: one matrix
    return Packing(tuple((g, 1) for g in gates), words=f"gates {', '.join(gates)} of a recurrent layer")


def _orientation(
    owner: str, parameter: bool, shape: Shape, partner: Shape | None, tower: Tower
) -> tuple[Orientation, str]:
    """Orientation, and a phrase on how it was decided (empty for the rule: `nn.Linear`, `O I`)."""
    if owner in GPT2_NAMES:
        return _gpt2_orientation(owner, shape, partner, tower)
    if owner in tower.family.transposed:
        return "IO", "stored I x O by this family, "
    if parameter and TRANSPOSED_PARAMETER.fullmatch(owner):
        return "IO", "stored I x O (a bare parameter, used as x @ W), "
    return "OI", ""


def _gpt2_orientation(owner: str, shape: Shape, partner: Shape | None, tower: Tower) -> tuple[Orientation, str]:
    """Orientation of GPT-2's layer names: `Conv1D` (`I O`) in GPT-2, `nn.Linear` in GPT-BigCode and open_clip.

    The shape of `c_attn` decides for itself and for the square `c_proj` that follows it.
    """
    attention = shape if owner == "c_attn" else partner if owner in ("c_proj", "q_attn") else None
    if (attention is not None and shape[0] == shape[1]) or owner == "c_attn":
        for factor in (3, 2):
            if attention is not None and attention[1] == factor * attention[0]:
                return "IO", "stored I x O (Conv1D: c_attn is wider than high), "
            if attention is not None and attention[0] == factor * attention[1]:
                return "OI", ""
    if tower.listed:
        return ("IO", "stored I x O (Conv1D), ") if owner in tower.family.transposed else ("OI", "")
    if owner in ("c_fc", "c_proj") and shape[0] != shape[1]:
        if (shape[1] > shape[0]) == (owner == "c_fc"):
            return "IO", f"stored I x O (as {shape[0]} x {shape[1]} can only be a Conv1D), "
        return "OI", ""
    return "OI", "square, taken as nn.Linear, "


UP = frozenset({*GATED, "up_proj", "gate_proj", "w1"})
DOWN = frozenset({*GATED.values(), "down_proj"})
_STACKED_ANYWHERE = frozenset(
    {"gate_up_proj", "gate_and_up_projs", "down_projs", "w13_weight", "w2_weight", "input_linear", "output_linear"}
)
_EXPERTS = re.compile(r"(?:^|[._])experts?(?:[._]|$)")


def is_stacked(name: str, owner: str, shape: Shape) -> bool:
    """Return True for a 3-D tensor whose name is that of stacked experts."""
    return len(shape) == 3 and (owner in _STACKED_ANYWHERE or (_EXPERTS.search(name) is not None))


def stacked_layout(owner: str, shape: Shape, partner: Shape | None, tower: Tower) -> TensorLayout:
    """Layout of a 3-D stack of weights; `owner` names its layer or parameter (`gate_up_proj`, `down_proj`, ...)."""
    up, down = (shape, partner) if owner in UP else (partner, shape)
    orientation, how = _stack_orientation(owner, shape, up, down, tower)
    rows = shape[1] if orientation == "OI" else shape[2]
    stored = "E x O x I" if orientation == "OI" else "E x I x O"
    why = f"{shape[0]} stacked experts stored {stored} ({how}), name ends in {owner}"
    packing = _stack_packing(owner, rows, orientation, up, down, tower)
    if isinstance(packing, Packing) and (blocks := packing.blocks(rows)) is not None:
        return TensorLayout(Role.STACKED_EXPERTS, f"packed {packing.words}, {rows} rows, {why}", orientation, blocks)
    return TensorLayout(Role.STACKED_EXPERTS, why, orientation)


def _stack_orientation(
    owner: str, shape: Shape, up: Shape | None, down: Shape | None, tower: Tower
) -> tuple[Orientation, str]:
    if up is not None and down is not None and len(up) == len(down) == 3:
        (_, a, b), (_, c, d) = up, down
        readings: dict[tuple[int, int], Orientation] = {(d, 2 * c): "IO", (2 * d, c): "OI"}
        if (a, b) in readings:
            return readings[a, b], "its shape and its partner's agree on no other reading"
    hidden = tower.hidden
    _, first, second = shape
    if hidden is not None and first != second and hidden in (first, second) and owner in (UP | DOWN):
        inputs_last = (second == hidden) == (owner in UP)
        return ("OI" if inputs_last else "IO"), f"hidden size {hidden}"
    if tower.listed:
        return tower.family.experts, "as this family stores them"
    return "OI", "shape and config leave it open, taken as in most families"


def _stack_packing(
    owner: str, rows: int, orientation: Orientation, up: Shape | None, down: Shape | None, tower: Tower
) -> Packing | str | None:
    """Gate and up, for a layer whose name allows both and whose rows are twice the inputs of its partner."""
    if owner not in GATED:
        return None
    if down is not None and len(down) == 3:
        if rows != 2 * (down[2] if orientation == "OI" else down[1]):
            return None
    elif owner not in ("gate_up_proj", "gate_and_up_projs", "w13_weight"):
        return None
    return _gate_and_up(owner, rows, tower)
