"""Tensors whose names suggest another meaning than they have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.tinymodels import made, saved, specs_of

import actmat
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import LayoutMap, Role, TensorLayout

DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**DECODER, "intermediate_size": 48, "vocab_size": 60, "pad_token_id": 0}


def layouts_of(model: Any, folder: Path) -> LayoutMap:
    tiny = saved(model, folder)
    return resolve_layout(tiny.specs, tiny.config)


def sizes(layout: TensorLayout) -> dict[str, int]:
    return {b.name: b.stop - b.start for b in layout.blocks}


def layout_of(name: str, shape: tuple[int, ...], config: dict[str, Any] | None = None) -> TensorLayout:
    return resolve_layout(specs_of({name: torch.empty(shape)}), config).tensors[name]


def test_a_tied_head_has_a_row_per_token(tmp_path: Path) -> None:
    import transformers as hf

    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "image_size": 32, "patch_size": 16, "output_channels": 8, "mlp_dim": 16, "num_pos_feats": 4}
    vision |= {"global_attn_indexes": [0]}
    mask = {"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 8}
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 16, "mask_input_channels": 4}
    model = hf.SamModel(hf.SamConfig(vision_config=vision, mask_decoder_config=mask, prompt_encoder_config=prompt))
    layouts = layouts_of(model, tmp_path)
    heads = [n for n in layouts.tensors if n.endswith("proj_out.weight")]
    assert len(heads) > 2
    assert {layouts.tensors[n].role for n in heads} == {Role.LINEAR}
    assert layouts.family == "sam"
    tied = {"tie_word_embeddings": True}
    assert layout_of("proj_out.weight", (4, 256), tied).role is Role.LINEAR
    assert layout_of("proj_out.weight", (60, 256), tied | {"vocab_size": 60}).role is Role.EMBEDDING
    assert layout_of("lm_head.weight", (64, 32), tied | {"vocab_size": 60}).role is Role.EMBEDDING  # padded


def test_lfm2_packs_three_maps_of_its_convolution(tmp_path: Path) -> None:
    model = made("lfm2", **SMALL, layer_types=["conv", "full_attention"])
    layout = layouts_of(model, tmp_path).tensors["model.layers.0.conv.in_proj.weight"]
    assert layout.role is Role.FUSED_LINEAR
    assert sizes(layout) == {"B": 32, "C": 32, "x": 32}


def test_mamba_packs_step_sizes_and_states(tmp_path: Path) -> None:
    model = made("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=60, state_size=6, time_step_rank=5)
    tensors = layouts_of(model, tmp_path).tensors
    assert sizes(tensors["backbone.layers.0.mixer.x_proj.weight"]) == {"dt": 5, "B": 6, "C": 6}
    assert sizes(tensors["backbone.layers.0.mixer.in_proj.weight"]) == {"x": 64, "gate": 64}
    assert tensors["backbone.layers.0.mixer.dt_proj.weight"].role is Role.LINEAR
    one = layout_of("mixer.x_proj.weight", (17, 64), {"model_type": "mamba"})
    assert one.role is Role.LINEAR
    assert "does not tell the rank of the step sizes" in one.reason


def test_mamba2_packs_five_maps(tmp_path: Path) -> None:
    sizes_of = {"hidden_size": 32, "state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2}
    model = made("mamba2", num_hidden_layers=1, vocab_size=60, **sizes_of)
    layout = layouts_of(model, tmp_path).tensors["backbone.layers.0.mixer.in_proj.weight"]
    assert sizes(layout) == {"gate": 64, "x": 64, "B": 12, "C": 12, "dt": 8}
    other = layout_of("mixer.in_proj.weight", (161, 32), model.config.to_dict())
    assert "do not fit its 161 rows" in other.reason


def test_zamba_alternates_input_and_gate() -> None:
    layout = layout_of("mamba.in_proj.weight", (8, 4), {"model_type": "zamba"})
    x, gate = layout.to_matrices(torch.arange(8.0)[:, None].expand(8, 4))
    assert x[:, 0].tolist() == [0, 2, 4, 6]
    assert gate[:, 0].tolist() == [1, 3, 5, 7]


def test_blip2_is_its_own_family(tmp_path: Path) -> None:
    import transformers as hf

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Blip2Config(
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        qformer_config={**tower, "vocab_size": 60, "encoder_hidden_size": 16},
        text_config={"model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "vocab_size": 60,
                     "num_attention_heads": 2, "word_embed_proj_dim": 16},
        num_query_tokens=3,
    )  # fmt: skip
    layouts = layouts_of(hf.Blip2ForConditionalGeneration(config), tmp_path)
    assert layouts.family == "blip-2"
    qkv = layouts.tensors["vision_model.encoder.layers.0.self_attn.qkv.weight"]
    assert sizes(qkv) == {"q": 16, "k": 16, "v": 16}
    assert layouts.tensors["query_tokens"].role is Role.EMBEDDING


@pytest.mark.parametrize(
    ("name", "shape", "config", "router"),
    [
        ("layers.0.mlp.gate.weight", (8, 64), {"num_experts": 8}, True),
        ("layers.0.mlp.gate.weight", (128, 64), {"num_experts": 8}, False),
        ("layers.0.mlp.gate.weight", (8, 64), {}, False),
        ("layers.0.mlp.router.weight", (8, 64), None, True),
        ("layers.0.mlp.router.classifier.weight", (4, 64), None, True),
        ("layers.0.mlp.shared_expert_gate.weight", (1, 64), None, True),
        ("classifier.weight", (10, 64), {"num_labels": 10}, False),
    ],
)
def test_routers_are_known_by_the_number_of_experts(
    name: str, shape: tuple[int, ...], config: dict[str, Any] | None, router: bool
) -> None:
    assert (layout_of(name, shape, config).role is Role.ROUTER) == router


def test_routers_are_averaged_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    def write(name: str, seed: int) -> str:
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        save_file({"mlp.router.weight": torch.randn(4, 8)}, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    base, experts = write("base", 0), [write("one", 1), write("two", 2)]
    (item,) = actmat.plan(base, experts).items
    assert item.action == "average"
    assert "only the order of its few outputs counts" in item.reason
    for fields in ({"scope": "all"}, {"roles": [{"match": "*", "role": "linear"}]},
                   {"rules": [{"match": "*router*", "method": "actmat"}]}):  # fmt: skip
        (item,) = actmat.plan(base, experts, **fields).items
        assert item.action == "merge"


def test_modulations_and_gated_feed_forward_blocks_are_packed() -> None:
    assert len(layout_of("transformer_blocks.0.norm1.linear.weight", (96, 16)).blocks) == 6
    assert len(layout_of("double_blocks.0.img_mod.lin.weight", (96, 16)).blocks) == 6
    assert len(layout_of("norm_out.linear.weight", (32, 24)).blocks) == 2
    assert layout_of("layers.0.norm1.linear.weight", (17, 16)).role is Role.LINEAR
    both = specs_of({"ff.net.0.proj.weight": torch.empty(64, 8), "ff.net.2.weight": torch.empty(8, 32)})
    assert sizes(resolve_layout(both, None).tensors["ff.net.0.proj.weight"]) == {"value": 32, "gate": 32}
    plain = specs_of({"ff.net.0.proj.weight": torch.empty(32, 8), "ff.net.2.weight": torch.empty(8, 32)})
    assert resolve_layout(plain, None).tensors["ff.net.0.proj.weight"].role is Role.LINEAR


def test_convolutions_of_one_point_are_merged_and_others_say_why_not(tmp_path: Path) -> None:
    def write(name: str, seed: int) -> str:
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        kernels = {"conv1.weight": (4, 6, 1, 1), "conv2.weight": (4, 6, 3, 3), "depthwise.weight": (4, 1, 1, 1)}
        save_file({n: torch.randn(s) for n, s in kernels.items()}, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    base, experts = write("base", 0), [write("one", 1), write("two", 2), write("three", 3)]
    items = {i.name: i for i in actmat.plan(base, experts).items}
    assert items["conv1.weight"].action == "merge"
    assert "kernel 1 x 1, a linear map of channels" in items["conv1.weight"].reason
    assert items["conv2.weight"].action == items["depthwise.weight"].action == "average"
    assert "scope: all or a rule merges it unfolded" in items["conv2.weight"].reason
    all_of_them = {i.name: i.action for i in actmat.plan(base, experts, scope="all").items}
    assert all_of_them == dict.fromkeys(items, "merge")


@pytest.mark.parametrize(
    ("name", "shape", "config", "blocks"),
    [
        ("conv.in_proj.weight", (96, 32), {"model_type": "lfm3"}, {"B": 32, "C": 32, "x": 32}),
        ("self_attention.kv_proj.weight", (32, 16), {"model_type": "jetmoe"}, {"k": 16, "v": 16}),
        ("attn.qkv.weight", (192, 32), {"model_type": "hiera"}, {"q": 64, "k": 64, "v": 64}),
        (
            "self_attn.q_proj.weight",
            (64, 32),
            {"model_type": "qwen3_next", "num_attention_heads": 4, "head_dim": 8, "hidden_size": 32},
            {"q": 8, "gate": 8},
        ),
    ],
)
def test_what_the_matrix_of_families_found_whole(
    name: str, shape: tuple[int, ...], config: dict[str, Any], blocks: dict[str, int]
) -> None:
    """Splits that the running code showed; of gated queries, in each of four heads."""
    layout = layout_of(name, shape, config)
    assert sizes(layout) == blocks
    assert {b.groups for b in layout.blocks} == ({4} if "gate" in blocks else {1})


def test_a_query_without_a_gate_stays_whole() -> None:
    config = {"model_type": "qwen3_next", "num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
    assert layout_of("self_attn.q_proj.weight", (32, 32), config).role is Role.LINEAR


@pytest.mark.parametrize(
    ("name", "rows", "columns", "reader", "expected"),
    [
        ("single_blocks.0.linear1", 70, 10, ("single_blocks.0.linear2", (10, 50)),
         {"q": 10, "k": 10, "v": 10, "mlp": 40}),
        ("single_blocks.0.linear1", 70, 10, ("single_blocks.0.linear2", (10, 30)),
         {"q": 10, "k": 10, "v": 10, "gate": 20, "up": 20}),
        ("b.0.attn.to_qkv_mlp_proj", 70, 10, ("b.0.attn.to_out", (10, 30)),
         {"q": 10, "k": 10, "v": 10, "gate": 20, "up": 20}),
        ("single_transformer_blocks.0.proj_mlp", 80, 10, ("single_transformer_blocks.0.proj_out", (10, 50)),
         {"up": 40, "gate": 40}),
        ("single_transformer_blocks.0.proj_mlp", 40, 10, ("single_transformer_blocks.0.proj_out", (10, 50)), {}),
        ("layers.0.modulation.f", 23, 10, None, {"query": 10, "context": 10, "gates": 3}),
        ("layers.0.modulation.projection_in", 40, 10, None, {}),
        ("double_stream_modulation_img.lin", 60, 10, None, {f"part{k}": 10 for k in range(6)}),
        ("early_stream_modulations.txt.linear", 30, 10, None, {f"part{k}": 10 for k in range(3)}),
        ("proj_out_1", 20, 10, None, {"part0": 10, "part1": 10}),
        ("proj_out_1", 25, 10, None, {}),
    ],
)  # fmt: skip
def test_parallel_branches_are_packed_where_their_reader_fits(
    name: str, rows: int, columns: int, reader: tuple[str, tuple[int, int]] | None, expected: dict[str, int]
) -> None:
    tensors = {f"{name}.weight": torch.empty(rows, columns)}
    if reader is not None:
        tensors[f"{reader[0]}.weight"] = torch.empty(reader[1])
    assert sizes(resolve_layout(specs_of(tensors), None).tensors[f"{name}.weight"]) == expected


@pytest.mark.parametrize("name", ["model.layers.0.hc_attn_fn", "model.layers.0.attn_hc.fn"])
def test_hyper_connections_are_three_maps_and_their_head_is_one(name: str) -> None:
    found = layout_of(name, (8, 64), {"hc_mult": 2})
    assert (found.role, sizes(found)) == (Role.FUSED_LINEAR, {"pre": 2, "post": 2, "mix": 4})
    head = layout_of("hc_head_fn", (8, 64), {"hc_mult": 8})
    assert (head.role, head.blocks) == (Role.LINEAR, ())
    assert "the config does not tell the number of residual streams" in layout_of(name, (8, 64), {}).reason
    assert "do not fit its 9 rows" in layout_of(name, (9, 64), {"hc_mult": 2}).reason


def test_the_small_gates_of_linear_attention_lie_per_key_head() -> None:
    config = {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 6}
    found = layout_of("model.layers.0.linear_attn.in_proj_ba.weight", (12, 8), config)
    assert [(b.name, b.start, b.stop, b.groups) for b in found.blocks] == [("beta", 0, 3, 2), ("decay", 3, 6, 2)]
    odd = config | {"linear_num_value_heads": 5}
    assert "does not tell the heads" in layout_of("linear_attn.in_proj_ba.weight", (10, 8), odd).reason


def test_values_of_differential_attention_stay_whole_with_the_reason() -> None:
    found = layout_of("layers.0.self_attn.v_proj.weight", (16, 8), {"model_type": "diffllama"})
    assert (found.role, found.blocks) == (Role.LINEAR, ())
    assert "both halves are channels of the same values" in found.reason
