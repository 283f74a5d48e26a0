"""The encoder, its checkpoints, the heads and the training."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.demo import TINY, TINY_ENCODER, some_photographs

from actmat.errors import CheckpointError
from actmat.extras.demo.model import EncoderConfig, features, fit_head, load_encoder, new_encoder, save_encoder
from actmat.extras.demo.tasks import Examples, generator_for
from actmat.extras.demo.training import DemoSchedule, finetune, train_base, warm_cosine

IMAGES = some_photographs(12).images_NHW


def test_patches_are_squares_in_reading_order():
    encoder, seen = new_encoder(TINY_ENCODER, seed=0), []
    encoder.patch_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    encoder(torch.arange(64.0).view(1, 8, 8))
    assert seen[0].shape == (1, 16, 4)
    assert seen[0][0, [0, 1, 4]].tolist() == [[0, 1, 8, 9], [2, 3, 10, 11], [16, 17, 24, 25]]


def test_features_depend_on_the_place_of_a_patch_and_on_every_pixel():
    encoder = new_encoder(TINY_ENCODER, seed=0)
    image = IMAGES[:1].clone().requires_grad_()
    encoder(image).square().mul(torch.arange(16.0)).sum().backward()
    assert (image.grad != 0).all()
    assert not torch.allclose(encoder(IMAGES), encoder(IMAGES.roll(2, dims=1)), atol=1e-5)


def test_initial_weights_follow_the_seed_and_leave_global_randomness_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, again, other = (new_encoder(TINY_ENCODER, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["patch_proj.weight"], other["patch_proj.weight"])


def test_a_checkpoint_is_an_ordinary_one_and_gives_the_same_bits(tmp_path):
    encoder = new_encoder(EncoderConfig(), seed=0)
    save_encoder(encoder, tmp_path / "deep" / "model")
    assert torch.equal(load_encoder(tmp_path / "deep" / "model")(IMAGES), encoder(IMAGES))
    assert json.loads((tmp_path / "deep" / "model" / "config.json").read_text())["model_type"] == "actmat-demo-vit"
    tensors = load_file(tmp_path / "deep" / "model" / "model.safetensors")
    assert tensors["layers.0.attention.in_proj_weight"].shape == (192, 64)
    assert not any("head" in name for name in tensors)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: expected .*found None"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="found 'bert'"):
        load_encoder(tmp_path)


def test_the_head_minimizes_the_ridge_objective():
    generator = torch.Generator().manual_seed(0)
    features_ND, labels_N = torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    head = fit_head(features_ND, labels_N, 3, ridge=0.2, scale=1.0)
    z, y = features_ND.double(), torch.eye(3, dtype=torch.float64)[labels_N]
    penalty = 0.2 * (z - z.mean(0)).square().sum() / 6
    weight, bias = head.weight_CD.double().requires_grad_(), head.bias_C.double().requires_grad_()
    (((z @ weight.mT + bias - y) ** 2).sum() + penalty * weight.square().sum()).backward()
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-4
    ten = fit_head(features_ND, labels_N, 3, ridge=0.2, scale=10.0)
    torch.testing.assert_close(ten(features_ND), 10 * head(features_ND))


def test_an_expert_learns_its_task_while_base_and_head_stay():
    labels_N = torch.arange(128) % 2
    noise = torch.rand(128, 8, 8, generator=generator_for(0, "noise"))
    examples = Examples(0.8 * noise + 0.2 * labels_N[:, None, None], labels_N)
    base, stranger = new_encoder(TINY_ENCODER, seed=0), new_encoder(TINY_ENCODER, seed=9)
    # a head that says nothing about the features of the base, so that there is all to gain
    head = fit_head(features(stranger, examples.images_NHW), labels_N, 2, ridge=0.1, scale=10.0)
    weight, before = head.weight_CD.clone(), copy.deepcopy(base.state_dict())
    experts = [copy.deepcopy(base) for _ in range(3)]
    for expert, seed in zip(experts, (0, 0, 1), strict=True):
        finetune(expert, head, examples, DemoSchedule(10, 32, 3e-3), generator_for(seed, "x"))

    def share(encoder):
        return float((head(features(encoder, examples.images_NHW)).argmax(1) == labels_N).float().mean())

    assert share(base) < 0.7
    assert share(experts[0]) > 0.9
    assert torch.equal(head.weight_CD, weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    first, again, other = (expert.state_dict() for expert in experts)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["norm.weight"], other["norm.weight"])
    assert all(not torch.equal(tensor, before[name]) for name, tensor in first.items())  # every tensor takes part


def test_the_base_is_reproducible_and_learns():
    first, again = (train_base(TINY, seed=4).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["patch_proj.weight"], new_encoder(TINY_ENCODER, seed=4).patch_proj.weight)


def test_the_learning_rate_rises_then_falls_to_nearly_nothing():
    shares = [warm_cosine(step, 100) for step in range(100)]
    assert shares[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert shares[9:11] == [1.0, 1.0]
    assert shares[55] == pytest.approx(0.5)
    assert shares[99] < 0.001
    assert shares[10:] == sorted(shares[10:], reverse=True)
