"""Names and shapes alone: checkpoints without a config, and names that mean the opposite of what they sound like."""

import pytest

from actmat.checkpoints.base import TensorSpec
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import LayoutMap, Role, TensorLayout


def specs(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, dtype, "f") for name, shape in shapes.items()}


def one(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorLayout:
    return resolve_layout(specs({name: shape}, dtype), None).tensors[name]


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("model.embed_tokens.weight", (100, 8), Role.EMBEDDING),
        ("wpe.weight", (16, 8), Role.EMBEDDING),
        ("bert.embeddings.token_type_embeddings.weight", (2, 8), Role.EMBEDDING),
        ("bert.embeddings.position_embeddings.weight", (16, 8), Role.EMBEDDING),
        ("model.decoder.embed_positions.weight", (16, 8), Role.EMBEDDING),
        ("gpt_neox.embed_in.weight", (100, 8), Role.EMBEDDING),
        ("shared.weight", (100, 8), Role.EMBEDDING),
        ("layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), Role.EMBEDDING),
        ("swin.blocks.0.attn.relative_position_bias_table", (49, 4), Role.EMBEDDING),
        ("quantizer.codebook.embed", (64, 8), Role.EMBEDDING),
        ("quantizer.codebooks.3.weight", (64, 8), Role.EMBEDDING),
        ("positional_embedding", (77, 8), Role.EMBEDDING),
        ("visual.class_embedding", (8,), Role.EMBEDDING),
        ("pos_embed", (1, 14, 14, 8), Role.EMBEDDING),
        ("query_tokens", (1, 32, 8), Role.EMBEDDING),
        # linear layers named like tables
        ("embed_out.weight", (100, 8), Role.LINEAR),
        ("model.vision_embed_tokens.weight", (8, 192), Role.LINEAR),
        ("class_embed.0.weight", (91, 8), Role.LINEAR),
        ("embeddings_project.weight", (16, 8), Role.LINEAR),
        ("encoder.embedding_hidden_mapping_in.weight", (16, 8), Role.LINEAR),
        ("time_embed.0.weight", (32, 8), Role.LINEAR),
        ("vision_model.embeddings.patch_embedding.weight", (8, 192), Role.LINEAR),
        # convolutions, and what is not one
        ("features.0.weight", (8, 3, 3, 3), Role.CONVOLUTION),
        ("patch_embed.proj.weight", (8, 3, 2, 14, 14), Role.CONVOLUTION),
        ("encoder.pos_conv_embed.conv.weight_v", (8, 2, 128), Role.CONVOLUTION),
        ("encoder.pos_conv_embed.conv.parametrizations.weight.original1", (8, 2, 128), Role.CONVOLUTION),
        ("encoder.pos_conv_embed.conv.parametrizations.weight.original0", (1, 1, 128), Role.VECTOR),
        ("transformer.h.0.attn.bias", (1, 1, 1024, 1024), Role.VECTOR),
        ("relation.weight", (8, 64, 64), Role.VECTOR),
        # norms and scales whatever their shape
        ("layers.0.self_attn.q_norm.weight", (4, 8), Role.VECTOR),
        ("blocks.0.layer_norm.weight", (1, 1, 8), Role.VECTOR),
        ("mixer.A_log", (64, 16), Role.VECTOR),
        ("logit_scale", (), Role.VECTOR),
        ("model.norm.weight", (8,), Role.VECTOR),
        ("attn.r_w_bias", (4, 8), Role.VECTOR),
        ("something.novel", (4, 8), Role.VECTOR),
        # heads and wrapped layers
        ("score.weight", (2, 8), Role.LINEAR),
        ("classifier.weight", (2, 8), Role.LINEAR),
        ("model.layers.0.q_proj.base_layer.weight", (8, 8), Role.LINEAR),
        ("attn.q_proj_weight", (8, 8), Role.LINEAR),
    ],
)
def test_role_by_name_and_shape(name: str, shape: tuple[int, ...], role: Role) -> None:
    assert one(name, shape).role is role


def test_depthwise_and_statistics_are_named_in_the_reason() -> None:
    assert "depthwise" in one("layers.0.conv.weight", (64, 1, 4)).reason
    assert "statistics" in one("bn1.running_var", (8,)).reason
    assert "unknown use" in one("something.novel", (4, 8)).reason


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8"])
def test_integers_and_booleans_are_buffers(dtype: str) -> None:
    assert one("embeddings.position_ids", (1, 77), dtype).role is Role.BUFFER
    assert one("mlp.down_proj.weight", (8, 8), dtype).role is Role.BUFFER


def open_clip() -> LayoutMap:
    shapes = {
        "visual.proj": (32, 24),
        "text_projection": (32, 24),
        "visual.conv1.weight": (32, 3, 8, 8),
        "visual.positional_embedding": (5, 32),
        "visual.ln_pre.weight": (32,),
        "token_embedding.weight": (60, 32),
        "transformer.resblocks.0.attn.in_proj_weight": (96, 32),
        "transformer.resblocks.0.attn.in_proj_bias": (96,),
        "transformer.resblocks.0.attn.out_proj.weight": (32, 32),
        "transformer.resblocks.0.mlp.c_fc.weight": (128, 32),
        "transformer.resblocks.0.mlp.c_proj.weight": (32, 128),
    }
    return resolve_layout(specs(shapes), None)


def test_open_clip_transposes_its_projections_and_nothing_else() -> None:
    layouts = open_clip().tensors
    transposed = {name for name, layout in layouts.items() if layout.orientation == "IO"}
    assert transposed == {"visual.proj", "text_projection"}
    assert layouts["transformer.resblocks.0.attn.in_proj_weight"].role is Role.FUSED_LINEAR
    assert layouts["transformer.resblocks.0.mlp.c_fc.weight"].role is Role.LINEAR


@pytest.mark.parametrize("transposed", [True, False])
def test_gpt2_names_without_config_follow_the_shape_of_c_attn(transposed: bool) -> None:
    shapes = {"h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_proj.weight": (8, 8), "h.0.mlp.c_fc.weight": (8, 32)}
    shapes["h.0.mlp.c_proj.weight"] = (32, 8)
    if not transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    layouts = resolve_layout(specs(shapes), None).tensors
    assert {layout.orientation for layout in layouts.values()} == {"IO" if transposed else "OI"}
    assert layouts["h.0.attn.c_attn.weight"].matrix_shapes(shapes["h.0.attn.c_attn.weight"]) == [(8, 8)] * 3


def test_packed_names_whose_shape_does_not_fit_stay_whole_and_say_so() -> None:
    for name, shape in {
        "attn.in_proj_weight": (25, 8),
        "attn.qkv.weight": (25, 8),
        "attn.query_key_value.weight": (24, 8),
        "attn.kv_a_proj_with_mqa.weight": (20, 8),
    }.items():
        layout = one(name, shape)
        assert layout.role is Role.LINEAR
        assert layout.blocks == ()
        assert "left whole" in layout.reason


def test_config_heads_that_do_not_fit_the_rows_leave_the_tensor_whole() -> None:
    config = {"model_type": "gpt_neox", "num_attention_heads": 3, "hidden_size": 9}
    name = "layers.0.attention.query_key_value.weight"
    layout = resolve_layout(specs({name: (24, 8)}), config).tensors[name]
    assert layout.role is Role.LINEAR
    assert "do not fit its 24 rows" in layout.reason


def test_gated_layers_are_recognized_by_the_layer_that_takes_their_product_in() -> None:
    gated = {"mlp.fc1.weight": (24, 8), "mlp.fc2.weight": (8, 12)}
    plain = {"mlp.fc1.weight": (24, 8), "mlp.fc2.weight": (8, 24)}
    assert len(resolve_layout(specs(gated), None).tensors["mlp.fc1.weight"].blocks) == 2
    assert resolve_layout(specs(plain), None).tensors["mlp.fc1.weight"].blocks == ()


@pytest.mark.parametrize(
    ("up", "down", "orientation"), [((4, 24, 8), (4, 8, 12), "OI"), ((4, 8, 24), (4, 12, 8), "IO")]
)
def test_stacked_experts_by_the_pair_of_shapes(up: tuple[int, ...], down: tuple[int, ...], orientation: str) -> None:
    shapes = {"mlp.experts.gate_up_proj": up, "mlp.experts.down_proj": down}
    for config in (None, {"model_type": "llama4_text"}, {"model_type": "mixtral"}):
        layouts = resolve_layout(specs(shapes), config).tensors
        assert {layout.orientation for layout in layouts.values()} == {orientation}
        assert layouts["mlp.experts.gate_up_proj"].matrix_shapes(up) == [(4, 12, 8), (4, 12, 8)]
        assert layouts["mlp.experts.down_proj"].matrix_shapes(down) == [(4, 8, 12)]


def test_stacked_experts_without_a_gate_need_the_hidden_size() -> None:
    shapes = {"mixer.experts.up_proj": (4, 8, 12), "mixer.experts.down_proj": (4, 12, 8)}
    known = resolve_layout(specs(shapes), {"hidden_size": 8}).tensors
    assert {layout.orientation for layout in known.values()} == {"IO"}
    unknown = resolve_layout(specs(shapes), None).tensors["mixer.experts.up_proj"]
    assert unknown.orientation == "OI"
    assert "leave it open" in unknown.reason


def test_each_tower_of_a_multimodal_model_is_read_with_its_own_heads() -> None:
    config = {
        "model_type": "some_vlm",
        "text_config": {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 16},
        "vision_config": {"model_type": "some_vit", "num_heads": 2, "hidden_size": 8},
    }
    shapes = {"model.layers.0.self_attn.qkv_proj.weight": (24, 16), "model.visual.blocks.0.attn.qkv.weight": (24, 8)}
    resolved = resolve_layout(specs(shapes), config)
    text, vision = (layout.blocks for layout in resolved.tensors.values())
    assert [(b.start, b.stop) for b in text] == [(0, 16), (16, 20), (20, 24)]
    assert [(b.start, b.stop) for b in vision] == [(0, 8), (8, 16), (16, 24)]
    assert resolved.family == "phi3"
