"""Models of open_clip, against a plain transcription of its forward pass under its own names."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.vision import write_clip
from tests.tolerances import F32_PRODUCT, relative_error
from torch import nn
from transformers import AutoTokenizer, CLIPModel, CLIPVisionModel

from actmat.errors import CheckpointError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.vision import clip
from actmat_experiments.vision.clip import clip_base, clip_source
from actmat_experiments.vision.open_clip import (
    CONFIG,
    WEIGHTS,
    clip_model,
    is_open_clip,
    transformers_config,
    translated,
)

VOCABULARY = 190  # that of the tiny tokenizer
SIZES = {
    "embed_dim": 12,
    "quick_gelu": False,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 20, "vocab_size": VOCABULARY, "width": 24, "heads": 3, "layers": 2},
}


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width, heads, act):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", act())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width, layers, heads, act):
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, act) for _ in range(layers))


class Visual(nn.Module):
    def __init__(self, width, layers, heads, act):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 16, 16, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn(5, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads, act)
        self.proj = nn.Parameter(torch.randn(width, 12))


class OpenClip(nn.Module):
    def __init__(self, act=nn.GELU):
        super().__init__()
        self.visual = Visual(32, 2, 4, act)
        self.transformer = Transformer(24, 2, 3, act)
        self.token_embedding = nn.Embedding(VOCABULARY, 24)
        self.positional_embedding = nn.Parameter(torch.randn(20, 24))
        self.ln_final = nn.LayerNorm(24)
        self.text_projection = nn.Parameter(torch.randn(24, 12))
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.5)

    def encode_image(self, pixels):
        v = self.visual
        x = v.conv1(pixels).flatten(2).mT
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        x = v.ln_pre(x)
        for block in v.transformer.resblocks:
            x = block(x)
        return v.ln_post(x[:, 0]) @ v.proj

    def encode_text(self, ids):
        n = ids.shape[1]
        x = self.token_embedding(ids) + self.positional_embedding[:n]
        mask = torch.full((n, n), float("-inf")).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        x = self.ln_final(x)
        return x[torch.arange(len(x)), ids.argmax(-1)] @ self.text_projection


def model_of(act=nn.GELU):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OpenClip(act).eval()


def state_of(model):
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


@pytest.fixture
def folder(tmp_path):
    """As on the hub: configuration, weights, tokenizer, and a config.json of timm."""
    write_clip(tmp_path / "clip")
    home = tmp_path / "open"
    home.mkdir()
    AutoTokenizer.from_pretrained(tmp_path / "clip").save_pretrained(home)
    (home / CONFIG).write_text(json.dumps({"model_cfg": SIZES, "preprocess_cfg": {}}))
    (home / "config.json").write_text(json.dumps({"architecture": "vit_base_patch16_clip"}))
    save_file(state_of(model_of()), home / WEIGHTS)
    return home


@pytest.mark.parametrize(("act", "quick"), [(nn.GELU, False), (QuickGELU, True)])
def test_images_and_texts_have_the_same_features(act, quick):
    ours = model_of(act)
    theirs = clip_model({**SIZES, "quick_gelu": quick}, state_of(ours)).eval()
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 32, 32, generator=rng)
    ids = torch.randint(1, VOCABULARY - 2, (3, 7), generator=rng)
    ids[:, 0], ids[:, 5], ids[:, 6] = VOCABULARY - 2, VOCABULARY - 1, 0
    with torch.inference_mode():
        image = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        text = theirs.text_projection(theirs.text_model(ids).pooler_output)
        assert relative_error(image, ours.encode_image(pixels)) < F32_PRODUCT
        assert relative_error(text, ours.encode_text(ids)) < F32_PRODUCT
    assert theirs.logit_scale == ours.logit_scale


def test_every_weight_is_taken_over(folder):
    config = transformers_config(SIZES)
    expected = {n: t.shape for n, t in CLIPModel(config).state_dict().items()}
    assert {n: t.shape for n, t in translated(state_of(model_of())).items()} == expected


def test_a_folder_of_open_clip_is_a_base(folder, tmp_path):
    cache = Cache(tmp_path / "cache")
    base = clip_base(cache, str(folder))
    encoder = CLIPVisionModel.from_pretrained(base / "encoder").eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    ours = model_of()
    with torch.inference_mode():
        features = encoder(pixels).pooler_output @ ours.visual.proj
        assert relative_error(features, ours.encode_image(pixels)) < F32_PRODUCT
    source, _ = clip_source(cache, str(folder))
    assert (
        AutoTokenizer.from_pretrained(source)("ab").input_ids == AutoTokenizer.from_pretrained(folder)("ab").input_ids
    )


def test_a_folder_that_is_both_is_read_as_it_is(folder, tmp_path):
    both = tmp_path / "clip"
    (both / CONFIG).write_text("{}")
    assert is_open_clip(folder)
    assert not is_open_clip(both)
    assert clip_source(Cache(tmp_path / "cache"), str(both))[0] == both


def test_a_tokenizer_of_another_size_is_refused(folder, tmp_path):
    wrong = {**SIZES, "text_cfg": {**SIZES["text_cfg"], "vocab_size": VOCABULARY + 10}}
    (folder / CONFIG).write_text(json.dumps({"model_cfg": wrong}))
    model = state_of(model_of())
    model["token_embedding.weight"] = torch.zeros(VOCABULARY + 10, 24)
    save_file(model, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"has {VOCABULARY + 10} tokens, the tokenizer .* {VOCABULARY}"):
        clip_base(Cache(tmp_path / "cache"), str(folder))


def test_pickles_are_not_opened(folder, tmp_path):
    (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"open_clip_pytorch_model\.bin. Pickles are not opened"):
        clip_base(Cache(tmp_path / "cache"), str(folder))


def test_other_models_are_named_with_what_is_odd():
    with pytest.raises(CheckpointError) as caught:
        transformers_config(
            {
                "embed_dim": 12,
                "vision_cfg": {**SIZES["vision_cfg"], "layers": [3, 4, 6, 3]},
                "text_cfg": {**SIZES["text_cfg"], "hf_model_name": "roberta-base"},
            }
        )
    assert "vision_cfg.layers: a ResNet" in str(caught.value)
    assert "text_cfg.hf_model_name" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"visual\.attn_pool\.query"):
        translated({**state_of(model_of()), "visual.attn_pool.query": torch.zeros(2)})


@pytest.mark.parametrize(
    ("tower", "key", "value"),
    [
        ("vision_cfg", "no_ln_pre", True),
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "attentional_pool", True),
        ("text_cfg", "hf_tokenizer_name", "bert-base-uncased"),
        ("text_cfg", "no_causal_mask", True),
        ("text_cfg", "proj_bias", True),
    ],
)
def test_what_would_change_the_forward_pass_is_refused(tower, key, value):
    with pytest.raises(CheckpointError, match=rf"{tower}\.{key}: {value!r}"):
        transformers_config({**SIZES, tower: {**SIZES[tower], key: value}})


def test_what_is_off_or_usual_is_accepted():
    vision = {**SIZES["vision_cfg"], "timm_model_name": None, "pool_type": "tok", "patch_dropout": 0.5}
    transformers_config({**SIZES, "vision_cfg": vision, "text_cfg": {**SIZES["text_cfg"], "pool_type": "argmax"}})
    with pytest.raises(CheckpointError, match=r"image_size: \[32, 48\] is not one number"):
        transformers_config({**SIZES, "vision_cfg": {**vision, "image_size": [32, 48]}})


def test_weights_that_do_not_fit_are_all_named():
    """Nothing is left at its random start: transformers would only warn."""
    state = state_of(model_of())
    del state["visual.ln_pre.weight"]
    state["ln_final.bias"] = torch.zeros(25)
    state["transformer.resblocks.2.ln_1.bias"] = torch.zeros(24)
    with pytest.raises(CheckpointError) as caught:
        clip_model(SIZES, state)
    assert "vision_model.pre_layrnorm.weight (32,) is missing" in str(caught.value)
    assert "final_layer_norm.bias has the shape (25,), the configuration wants (24,)" in str(caught.value)
    assert "text_model.encoder.layers.2.layer_norm1.bias has no place" in str(caught.value)


def test_names_of_the_package(folder, tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    with pytest.raises(CheckpointError, match="pip install open_clip_torch"):
        clip_base(cache, "open_clip:ViT-B-32:laion2b")
    with pytest.raises(CheckpointError, match="expected open_clip:NAME:TAG"):
        clip_base(cache, "open_clip:ViT-B-32")

    def create_model(name, pretrained):
        if pretrained != "openai":
            raise RuntimeError(f"Pretrained weights ({pretrained}) not found for model {name}.")
        return model_of(QuickGELU)

    package = SimpleNamespace(get_model_config={"ViT-B-32": SIZES}.get, create_model=create_model)
    monkeypatch.setitem(sys.modules, "open_clip", package)
    monkeypatch.setattr(clip, "_TOKENIZER", (str(folder), "main"))
    with pytest.raises(CheckpointError, match="knows no model 'ViT-X'"):
        clip_base(cache, "open_clip:ViT-X:openai")
    with pytest.raises(CheckpointError, match=r"Pretrained weights \(laion\) not found"):
        clip_base(cache, "open_clip:ViT-B-32:laion")
    base = clip_base(cache, "open_clip:ViT-B-32:openai")
    assert CLIPVisionModel.from_pretrained(base / "encoder").config.hidden_act == "quick_gelu", "as the modules say"
