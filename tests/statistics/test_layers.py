"""Gram matrices of every kind of layer against loops over single tokens in float64, padding included."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.grams import linear_grams, measured_gram, outer_sum, padded_batches, tokens
from tests.helpers.models import BY_NAME, VOCABULARY
from tests.tolerances import F32_PRODUCT, F64_IDENTITY, relative_error
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from actmat.extras.collect.collect import Collected, collect

LINEAR = (nn.Linear, Conv1D)


def loaded(name: str, folder: Path) -> Any:
    case = BY_NAME[name]
    case.build().save_pretrained(folder / name)
    return case.loader.from_pretrained(folder / name, dtype=torch.float32).eval()


def check(result: Collected, expected: dict[str, Tensor], tolerance: float = F32_PRODUCT) -> None:
    disk = {memory.removesuffix(".weight"): d for d, memory in result.header.memory.items()}
    for name, gram in expected.items():
        stored = disk.get(name, f"{name}.weight")
        if stored not in result.header.places:
            raise AssertionError(f"{stored} was not measured: {result.header.absent.get(stored)}")
        assert relative_error(measured_gram(result, stored), gram) < tolerance, stored


@pytest.mark.parametrize(("name", "left"), [("bert", False), ("gpt2", True), ("llama", True)])
def test_padding_is_left_out_by_the_models_mask(name: str, left: bool, tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    batches = padded_batches(VOCABULARY, left=left)
    masks = {b["attention_mask"].shape[1]: b["attention_mask"] for b in batches}
    expected = linear_grams(model, LINEAR, lambda: [model(**b) for b in batches], lambda _, x: masks[x.shape[1]])
    expected = {n: g for n, g in expected.items() if not n.endswith(("lm_head", "decoder"))}  # tied to the embedding
    result = collect(model, batches, compute_dtype="float64", dtype="float64")
    check(result, expected, F64_IDENTITY)
    check(collect(model, batches), expected)
    assert len(expected) >= 8
    assert result.header.tokens == sum(int(m.sum()) for m in masks.values())
    assert result.header.samples == 6


def test_t5_keeps_the_tokens_of_encoder_and_decoder_apart(tmp_path: Path) -> None:
    """Source and target of equal length: shapes alone could not tell whose padding is whose."""
    model = loaded("t5", tmp_path)
    source = padded_batches(VOCABULARY, n=1)[0]
    target = padded_batches(VOCABULARY, n=1, left=True)[0]
    batch = {
        **source,
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
    }

    def mask_of(name: str, states: Tensor) -> Tensor:
        of_source = name.startswith("encoder.") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        return (source if of_source else target)["attention_mask"]

    expected = linear_grams(model, LINEAR, lambda: model(**batch), mask_of)
    result = collect(model, [batch], compute_dtype="float64", dtype="float64")
    check(result, {n: g for n, g in expected.items() if n != "lm_head"}, F64_IDENTITY)
    same = {p[0].gram for n, p in result.header.places.items() if "EncDecAttention.k" in n or "EncDecAttention.v" in n}
    assert len(same) == 1  # all read the encoder's output


def test_clip_masks_text_and_counts_all_patches(tmp_path: Path) -> None:
    model = loaded("clip", tmp_path)
    batch = padded_batches(VOCABULARY, n=1)[0] | {"pixel_values": torch.randn(3, 3, 16, 16)}
    mask = batch["attention_mask"]
    expected = linear_grams(
        model, LINEAR, lambda: model(**batch), lambda n, _: mask if n.startswith("text_model") else None
    )
    result = collect(model, [batch], compute_dtype="float64", dtype="float64")
    check(result, expected, F64_IDENTITY)
    patches = batch["pixel_values"].unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(-1, 192)
    name = "vision_model.embeddings.patch_embedding.weight"
    assert relative_error(measured_gram(result, name), outer_sum(patches)) < F64_IDENTITY
    ids = batch["input_ids"][mask.bool()]
    counts = result.tensors["counts.text_model.embeddings.token_embedding.weight"]
    assert torch.equal(counts, torch.bincount(ids, minlength=VOCABULARY))


def test_mixtral_sums_for_each_expert_the_tokens_routed_to_it(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path).double()  # how float32 rounds depends on the number of rows at once
    model.set_experts_implementation("eager")  # grouped products have no float64
    batch = padded_batches(VOCABULARY, n=1)[0]
    real = batch["attention_mask"].flatten().bool()
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        m.register_forward_pre_hook(lambda _, args, n=n: calls.append((n, args[0].clone(), args[1].clone())))
        for n, m in model.named_modules()
        if n.endswith("mlp.experts")
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    result = collect(model, [batch], compute_dtype="float64", dtype="float64")
    seen = 0
    for name, hidden, chosen in calls:
        module = model.get_submodule(name)
        stem = name.replace("mlp.experts", "block_sparse_moe.experts")
        for expert in range(4):
            rows = [hidden[t] for t in range(len(hidden)) if real[t] and expert in chosen[t]]
            if not rows:
                assert f"{stem}.{expert}.w1.weight" in result.header.absent
                continue
            seen += len(rows)
            gram = outer_sum(rows)
            for which in ("w1", "w3"):
                assert relative_error(measured_gram(result, f"{stem}.{expert}.{which}.weight"), gram) < F64_IDENTITY
            gate, up = (functional.linear(torch.stack(rows), module.gate_up_proj[expert])).chunk(2, dim=-1)
            inner = outer_sum(functional.silu(gate) * up)
            assert relative_error(measured_gram(result, f"{stem}.{expert}.w2.weight"), inner) < F32_PRODUCT
    assert seen == 2 * 2 * int(real.sum())  # two layers, two experts for every token
    assert set(result.header.stacks.values()) == {int(real.sum())}


def test_padding_kept_from_experts_changes_no_token(tmp_path: Path) -> None:
    model = loaded("mixtral", tmp_path)
    batch = padded_batches(VOCABULARY, n=1)[0]
    outputs: list[Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: outputs.append(args[0].clone()))
    with torch.no_grad():
        model(**batch)
    collect(model, [batch])
    handle.remove()
    real = batch["attention_mask"].bool()
    assert relative_error(outputs[1][real], outputs[0][real]) < F32_PRODUCT


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_with_its_fast_path(batch_first: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    states = torch.randn(3, 5, 8)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    given = states if batch_first else states.transpose(0, 1)

    batch = {"src": given, "src_key_padding_mask": padding}
    result = collect(model, [batch], compute_dtype="float64", dtype="float64")
    x, real = states.double(), ~padding
    for n, block in enumerate(copy.deepcopy(model).double().layers):
        mixed = attention(block.self_attn, x, x, padding)
        between = block.norm1(x + block.self_attn.out_proj(mixed))
        inner = block.linear1(between).relu()
        inputs = {"self_attn.in_proj_weight": x, "self_attn.out_proj.weight": mixed}
        for name, rows in (inputs | {"linear1.weight": between, "linear2.weight": inner}).items():
            got = measured_gram(result, f"layers.{n}.{name}")
            assert relative_error(got, outer_sum(tokens(rows, real))) < F32_PRODUCT, name
        x = block.norm2(between + block.linear2(inner))


def attention(module: nn.MultiheadAttention, query: Tensor, key: Tensor, padding: Tensor | None) -> Tensor:
    """What goes into the output projection, by the book."""
    e = module.embed_dim
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(e)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = module.in_proj_bias.split(e)
    q, k, v = (functional.linear(x, w, b) for x, w, b in zip((query, key, key), weights, biases, strict=True))
    heads = [t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
    scores = heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kdim", [None, 6])
def test_cross_attention_packed_and_with_separate_projections(kdim: int | None) -> None:
    torch.manual_seed(4)
    module = nn.MultiheadAttention(8, 2, kdim=kdim, vdim=kdim, batch_first=True).eval()
    query, key = torch.randn(2, 3, 8), torch.randn(2, 5, kdim or 8)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()

    batch = {"query": query, "key": key, "value": key, "key_padding_mask": padding}
    before = module(**batch)[0]
    result = collect(module, [batch], compute_dtype="float64", dtype="float64")
    of_query, of_key = outer_sum(tokens(query, None)), outer_sum(tokens(key, ~padding))
    if kdim is None:
        got = [measured_gram(result, "in_proj_weight", rows=[8 * k, 8 * k + 8]) for k in range(3)]
    else:
        got = [measured_gram(result, f"{n}_proj_weight") for n in "qkv"]
    for gram, expected in zip(got, (of_query, of_key, of_key), strict=True):
        assert relative_error(gram, expected) < F64_IDENTITY
    mixed = attention(copy.deepcopy(module).double(), query.double(), key.double(), padding)
    assert relative_error(measured_gram(result, "out_proj.weight"), outer_sum(tokens(mixed, None))) < F32_PRODUCT
    assert relative_error(module(**batch)[0], before) == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 7, 6)),
        (nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2), padding="same"), (2, 4, 6, 5)),
        (nn.Conv2d(3, 3, 3, groups=3, padding_mode="circular", padding=1), (1, 3, 5, 5)),
        (nn.Conv1d(4, 5, 3, padding="valid"), (2, 4, 9)),
        (nn.Conv3d(2, 3, (1, 2, 2)), (1, 2, 3, 4, 4)),
    ],
    ids=["strided", "grouped", "depthwise", "one", "three"],
)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """The Gram is right when it explains the outputs: `sum y^2 = tr(W G W^T)` for any weights, per group."""
    model = nn.Sequential(layer).eval()
    x = torch.randn(shape)
    result = collect(model, [x], compute_dtype="float64", dtype="float64")
    info = result.header.grams["0.weight"]
    groups = layer.groups
    grams = measured_gram(result, "0.weight").reshape(groups, info.width, info.width)
    generator = torch.Generator().manual_seed(1)
    double = copy.deepcopy(layer).double()
    for _ in range(3):
        weight = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
        double.weight.data.copy_(weight)
        double.bias.data.zero_()
        out = double(x.double()).detach()
        split = weight.flatten(1).unflatten(0, (groups, -1))
        energy = torch.einsum("goi,gij,goj->", split, grams, split)
        assert relative_error(energy, out.square().sum()) < F64_IDENTITY
    assert info.rows == out[:, 0].numel()


def test_a_layer_called_twice_and_a_bare_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Linear(4, 4)
            self.proj = nn.Parameter(torch.randn(4, 3))
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.twice(x)
            return self.twice(y) @ self.proj

    model = Model().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    result = collect(model, [x, x[:2]], compute_dtype="float64", dtype="float64")
    y = model.twice(x).detach()
    z = model.twice(y).detach()
    twice = outer_sum([*x, *y, *x[:2], *y[:2]])
    assert relative_error(measured_gram(result, "twice.weight"), twice) < F64_IDENTITY
    assert relative_error(measured_gram(result, "proj"), outer_sum([*z, *z[:2]])) < F64_IDENTITY
    assert result.header.absent == {"unused.weight": "no input of it was seen"}


def test_hooks_are_removed_when_a_batch_fails() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16)
    hooked = []

    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules())

    batches = [torch.randn(3, 1, 8), torch.randn(3, 1, 7)]
    with pytest.raises(RuntimeError):  # the second batch has another width
        collect(net, batches, progress=lambda samples, tokens: hooked.append(hooks()))
    assert hooked[0] > 0
    assert hooks() == 0
