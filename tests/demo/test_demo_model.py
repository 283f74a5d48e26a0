"""The encoder, its checkpoints and the heads on top of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.demo import TINY_ENCODER, some_photographs

from actmat.errors import CheckpointError
from actmat.extras.demo.heads import fit_head, load_heads, save_heads
from actmat.extras.demo.model import EncoderConfig, load_encoder, new_encoder, save_encoder

IMAGES = some_photographs(12).images_NHW


def test_patches_are_squares_in_reading_order():
    encoder = new_encoder(TINY_ENCODER, seed=0)
    patches = encoder._patches(torch.arange(64.0).view(1, 8, 8))
    assert patches.shape == (1, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 1].tolist() == [2, 3, 10, 11]
    assert patches[0, 4].tolist() == [16, 17, 24, 25]


def test_features_depend_on_the_place_of_a_patch_and_on_every_pixel():
    encoder = new_encoder(TINY_ENCODER, seed=0)
    image = IMAGES[:1].clone().requires_grad_()
    encoder(image).square().mul(torch.arange(16.0)).sum().backward()
    assert (image.grad != 0).all()
    assert encoder(IMAGES).shape == (12, 16)
    assert not torch.allclose(encoder(IMAGES), encoder(IMAGES.roll(2, dims=1)), atol=1e-5)


def test_initial_weights_follow_the_seed_and_leave_global_randomness_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, again, other = (new_encoder(TINY_ENCODER, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["patch_proj.weight"], other["patch_proj.weight"])


def test_a_reloaded_encoder_gives_the_same_bits(tmp_path):
    encoder = new_encoder(TINY_ENCODER, seed=0)
    save_encoder(encoder, tmp_path / "deep" / "model")
    reloaded = load_encoder(tmp_path / "deep" / "model")
    assert reloaded.config == TINY_ENCODER
    assert torch.equal(reloaded(IMAGES), encoder(IMAGES))


def test_the_checkpoint_is_an_ordinary_one(tmp_path):
    save_encoder(new_encoder(EncoderConfig(), seed=0), tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "actmat-demo-vit"
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert tensors["layers.0.attention.in_proj_weight"].shape == (192, 64)
    assert not any("head" in name for name in tensors)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="'bert'"):
        load_encoder(tmp_path)


def test_the_head_minimises_the_ridge_objective():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 6, generator=generator)
    labels = torch.randint(3, (50,), generator=generator)
    head = fit_head(features, labels, 3, ridge=0.2, scale=1.0)

    z, y = features.double(), torch.eye(3, dtype=torch.float64)[labels]
    penalty = 0.2 * (z - z.mean(0)).square().sum() / 6
    weight, bias = head.weight_CD.double().requires_grad_(), head.bias_C.double().requires_grad_()
    (((z @ weight.mT + bias - y) ** 2).sum() + penalty * weight.square().sum()).backward()
    assert weight.grad.abs().max() < 1e-4
    assert bias.grad.abs().max() < 1e-4


def test_scale_multiplies_the_logits():
    features, labels = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    one, ten = (fit_head(features, labels, 2, ridge=0.1, scale=s) for s in (1.0, 10.0))
    torch.testing.assert_close(ten(features), 10 * one(features))


def test_a_head_separates_what_can_be_separated():
    labels = torch.arange(60) % 3
    features = torch.nn.functional.one_hot(labels, 3).float() + 0.01 * torch.randn(60, 3)
    assert torch.equal(fit_head(features, labels, 3, ridge=0.01, scale=10.0)(features).argmax(1), labels)


def test_heads_come_back_from_their_file(tmp_path):
    features = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    heads = {f"t{k}": fit_head(features, torch.arange(30) % k, k, ridge=0.1, scale=1.0) for k in (2, 3)}
    save_heads(heads, tmp_path / "heads.safetensors")
    found = load_heads(tmp_path / "heads.safetensors")
    assert sorted(found) == ["t2", "t3"]
    for task, head in heads.items():
        assert torch.equal(found[task](features), head(features))
