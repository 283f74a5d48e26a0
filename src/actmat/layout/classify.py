"""Classify a tensor by its name and shape, with rules that hold for any architecture.

Order of the rules: entries that are not floating point; names of biases and norms; tables of vectors; stacked
experts; convolutions; linear layers. Any other tensor is a `vector` (entry by entry), with a reason that says so.
"""

from __future__ import annotations

import re
from dataclasses import replace

from actmat.checkpoints.base import TensorSpec
from actmat.layout import fused
from actmat.layout.families import Tower
from actmat.layout.modulation import branch_packing, modulation_packing
from actmat.layout.packing import first_int
from actmat.layout.types import Role, TensorLayout

# modules that wrap a layer; not part of the layer's name
_WRAPPERS = frozenset({"base_layer", "parametrizations", "module", "_orig_mod", "original_module"})
_WEIGHTS = frozenset({"weight", "weight_v", "weight_orig", "original1", "original", "kernel"})
_MAGNITUDES = frozenset({"weight_g", "original0"})

_NORM = re.compile(
    r"(?:\w*_)?(?:(?:layer|batch|group|rms|instance|l2)_?)?norm(?:alization)?s?\d*|ln_?\w*|grn|bn\d*", re.I
)
_BIAS = re.compile(r"(?:\w*_)?bias(?:es)?(?:_[a-z])?\d*")
_STATISTICS = re.compile(r"running_(?:mean|var)")
_COMPUTED = re.compile(
    r"(?:position|token_type|cache_position)_ids|relative_(?:position|coords)_(?:index|table)|num_batches_tracked|"
    r"(?:\w*_)?inv_freq|masked_bias|(?:causal|attn|attention)_mask"
)
"""Buffers that a model computes or counts, some of which are cast to floats with the weights."""
_SCHEDULE = re.compile(r"betas|sigmas|\w*alphas_cumprod\w*|posterior_\w+|lvlb_weights")
"""Numbers of a noise schedule, settings that tools of latent diffusion store beside the weights."""

_SCALE = re.compile(
    r"A_log|D|gamma\w*|beta|lambda\w*|alpha\w*|\w*scale\w*|\w*_decay|time_(?:mix|decay|first|maa)\w*|sinks"
)

# linear layers and convolutions that are named like tables
_NOT_A_TABLE = re.compile(
    r"\w*patch_embed\w*|embed_(?:out|proj|patches|action|return|state)\w*|\w*embeddings?_proj\w*|vision_embed_tokens|"
    r"embedding_hidden_mapping_in|(?:class|bbox|score)_embed|pos_conv_embed|"
    r"(?:predictor|relative_pos|box_linear|xpath_unitseq2)_embeddings|"
    r"(?:time|timestep|cond|value|guidance|pooled)_(?:emb|embed|embedding|embedder)"
)
_TABLE = re.compile(
    r"(?:\w*_)?(?:wte|wpe|emb|embeds?|embeddings?|codebooks?|codevectors)(?:_\d+|_table|_window)?|embed_\w+|shared|"
    r"\w*embed_tokens\w*|tokens_embed|\w*_embeds_layers?|(?:row|column|queries)_embedder|relative_attention_bias|"
    r"\w*position_bias_table|rel_pos_[hw]|emb_rel_[kv]|query_feat|queries_features"
)
_TOKEN = re.compile(r"\w+_tokens?|class_embedding|latents(?:_\dd)?|latent_query|probe|masked_spec_embed|image_newline")
_INDEXED_TABLE = re.compile(r"embed_tokens|\w*embeddings|\w*_embeds_layers|codebooks?|emb|point_embed")

_ROUTER = re.compile(r"gate|router|wg|classifier|layer|shared_expert_gate")
_SURELY_ROUTER = re.compile(r".*(?:shared_expert_gate|(?:router|moe|mixture)\w*(?:\.\w+)?)\.weight")
EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "num_moe_experts",
)
"""Names under which configs give the number of experts of a mixture."""
_MATRIX_PARAMETER = re.compile(r"[qkv]_proj_weight|(?:gate|up|down)_proj|[wv]\d")
_LONGEST_UNNAMED_KERNEL = 16
ROUTER_REASON = "router of a mixture: only the order of its few outputs counts, which no method for activations keeps; "


def owner_of(name: str) -> tuple[str, str, bool]:
    """The layer that a tensor belongs to, the tensor's name in it, and whether an index stands between them.

    `h.0.attn.c_attn.weight`: `c_attn`, `weight`; a bare parameter is its own layer: `attn.in_proj_weight`.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if len(parts) > 2 and parts[-2] == "weight" and parts[-1] in ("original0", "original1", "original"):
        del parts[-2]  # a parametrization: layer.parametrizations.weight.original1
    leaf = parts[-1]
    if len(parts) == 1 or not (leaf in _WEIGHTS or leaf in _MAGNITUDES or leaf == "bias"):
        return leaf, "", False
    named = [part for part in parts[:-1] if not part.isdigit()]
    return (named[-1] if named else leaf), leaf, parts[-2].isdigit()


def is_variance(name: str) -> bool:
    """True for the running variance of a BatchNorm, of which the root is taken: it must not become negative.

    >>> is_variance("bn1.running_var"), is_variance("bn1.running_mean")
    (True, False)
    """
    return owner_of(name)[0] == "running_var"


def is_computed(name: str) -> bool:
    """True for a buffer that a model computes or counts.

    >>> is_computed("embeddings.position_ids"), is_computed("router.tid2eid")
    (True, False)
    """
    owner, leaf, _ = owner_of(name)
    return not leaf and _COMPUTED.fullmatch(owner) is not None


def classify(spec: TensorSpec, partner: tuple[int, ...] | None, tower: Tower) -> TensorLayout:
    """Layout of one tensor, given the stored shape of its partner layer (`fused.PARTNERS`), if there is one."""
    owner, leaf, indexed = owner_of(spec.name)
    shape = spec.shape
    if is_computed(spec.name):
        return TensorLayout(Role.BUFFER, f"indices or a computed buffer, by the name {owner}")
    if not spec.is_floating or (not leaf and _SCHEDULE.fullmatch(owner)):
        what = spec.dtype if not spec.is_floating else "noise schedule"
        return TensorLayout(Role.BUFFER, f"{what} entries ({leaf or owner})")
    if len(shape) <= 1:
        return _vector_or_token(shape, owner, leaf)
    table = _is_table(owner, tower) and (not indexed or _INDEXED_TABLE.fullmatch(owner) is not None)
    if leaf == "bias" or leaf in _MAGNITUDES or (not leaf and _BIAS.fullmatch(owner) and not table):
        what = "weight-norm magnitudes" if leaf in _MAGNITUDES else "a bias, or a mask named like one"
        return TensorLayout(Role.VECTOR, f"{len(shape)}-D, but {what}, by the name {leaf or owner}")
    if _NORM.fullmatch(owner):
        return TensorLayout(Role.VECTOR, f"{len(shape)}-D scale of a norm, by the name {owner}")
    if table and (len(shape) == 2 or not leaf):
        return TensorLayout(Role.EMBEDDING, f"table of vectors, by the name {owner}")
    if fused.is_stacked(spec.name, owner, shape):
        return fused.stacked_layout(owner, shape, partner, tower)
    if len(shape) >= 3:
        return _convolution_or_unknown(spec, owner, leaf)
    if not leaf and (_SCALE.fullmatch(owner) or not _is_matrix_parameter(owner, tower)):
        return _scale_or_unknown("2-D parameter", owner, leaf)
    layout = fused.linear_layout(owner, not leaf, shape, partner, tower)
    if _is_router(spec.name, owner, shape, tower):
        return replace(layout, role=Role.ROUTER, reason=ROUTER_REASON + layout.reason, blocks=())
    rows, cols = shape
    packing = modulation_packing(spec.name, rows, cols) or branch_packing(spec.name, rows, cols, partner)
    if packing is not None and layout.role is Role.LINEAR and (blocks := packing.blocks(rows)) is not None:
        return TensorLayout(Role.FUSED_LINEAR, f"packed {packing.words}, {rows} rows", blocks=blocks)
    return layout


def _is_router(name: str, owner: str, shape: tuple[int, ...], tower: Tower) -> bool:
    """True for the linear map that chooses among as many experts as the config says, or lies in a router."""
    if not _ROUTER.fullmatch(owner):
        return False
    counts = {n for key in EXPERT_COUNTS if (n := first_int(tower.config, key)) is not None}
    rows = shape[1] if owner in tower.family.transposed else shape[0]
    return rows in counts or (_SURELY_ROUTER.fullmatch(name) is not None and rows < max(shape))


def _is_table(owner: str, tower: Tower) -> bool:
    named = _TOKEN.fullmatch(owner) or _TABLE.fullmatch(owner)
    return owner in tower.family.tables or (named is not None and not _NOT_A_TABLE.fullmatch(owner))


def _is_matrix_parameter(owner: str, tower: Tower) -> bool:
    """Return True for names of bare 2-D parameters that are linear maps."""
    patterns = (fused.TRANSPOSED_PARAMETER, fused.RECURRENT, _MATRIX_PARAMETER, fused.HYPER_CONNECTION)
    return owner in {*fused.QKV, *fused.GATED, *tower.family.transposed} or any(p.fullmatch(owner) for p in patterns)


def _vector_or_token(shape: tuple[int, ...], owner: str, leaf: str) -> TensorLayout:
    if not leaf and shape and _TOKEN.fullmatch(owner):
        return TensorLayout(Role.EMBEDDING, f"a single token's vector, by the name {owner}")
    if _STATISTICS.fullmatch(owner):
        return TensorLayout(Role.VECTOR, f"buffer statistics of a BatchNorm ({owner}), float, so merged like a vector")
    if not shape:
        return TensorLayout(Role.VECTOR, "a scalar")
    kind = "bias" if leaf == "bias" or _BIAS.fullmatch(owner) else "norm" if _NORM.fullmatch(owner) else "parameter"
    return TensorLayout(Role.VECTOR, f"1-D {kind}")


def _convolution_or_unknown(spec: TensorSpec, owner: str, leaf: str) -> TensorLayout:
    shape = spec.shape
    by_name = re.search(r"conv|patch_embed", spec.name, re.I) is not None
    by_shape = len(shape) >= 4 or shape[-1] <= _LONGEST_UNNAMED_KERNEL
    if leaf and (by_name or by_shape):
        depthwise = ", depthwise (one input channel per group)" if shape[1] == 1 else ""
        kernel = " x ".join(map(str, shape[2:]))
        return TensorLayout(Role.CONVOLUTION, f"{len(shape)}-D weight, kernel {kernel}{depthwise}")
    return _scale_or_unknown(f"{len(shape)}-D tensor", owner, leaf)


def _scale_or_unknown(what: str, owner: str, leaf: str) -> TensorLayout:
    if not leaf and _SCALE.fullmatch(owner):
        return TensorLayout(Role.VECTOR, f"{what.split()[0]} scale or decay, by the name {owner}")
    why = f"{what} named {owner}, of unknown use: entry by entry unless the recipe sets its role"
    return TensorLayout(Role.VECTOR, why)
