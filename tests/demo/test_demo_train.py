"""Training: learns, repeats itself bit by bit, and never touches base or heads."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.demo import TINY_ENCODER, some_photographs

from actmat.engine.resources import one_thread
from actmat.extras.demo.heads import correct, features, fit_head
from actmat.extras.demo.model import new_encoder
from actmat.extras.demo.tasks import Examples
from actmat.extras.demo.train import finetune, pretrain
from actmat.extras.demo.training import Schedule, generator_for, steps_of, warm_cosine


def bright_or_dark(n=128):
    """Something that can be learnt in a few steps."""
    labels = torch.arange(n) % 2
    noise = torch.rand(n, 8, 8, generator=torch.Generator().manual_seed(0))
    return Examples(0.8 * noise + 0.2 * labels[:, None, None], labels)


def head_of_another_model(examples):
    """It says nothing about the features of the base, so that there is all to gain."""
    stranger = new_encoder(TINY_ENCODER, seed=9)
    return fit_head(features(stranger, examples.images_NHW), examples.labels_N, 2, ridge=0.1, scale=10.0)


def copy_of(encoder):
    return {name: tensor.clone() for name, tensor in encoder.state_dict().items()}


def test_an_expert_learns_its_task_while_base_and_head_stay():
    base, examples = new_encoder(TINY_ENCODER, seed=0), bright_or_dark()
    head = head_of_another_model(examples)
    before, weight, bias = copy_of(base), head.weight_CD.clone(), head.bias_C.clone()
    steps = []
    expert = finetune(
        copy.deepcopy(base),
        head,
        examples,
        Schedule(10, 32, 3e-3),
        generator=generator_for(0, "x"),
        on_step=lambda: steps.append(1),
    )
    assert correct(base, head, examples).float().mean() < 0.7
    assert correct(expert, head, examples).float().mean() > 0.9
    assert torch.equal(head.weight_CD, weight)
    assert torch.equal(head.bias_C, bias)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert len(steps) == steps_of(Schedule(10, 32, 3e-3), 128) == 40
    # full fine-tuning: every tensor takes part
    assert all(not torch.equal(tensor, before[name]) for name, tensor in expert.state_dict().items())


def test_the_same_seed_trains_the_same_bits():
    base, examples = new_encoder(TINY_ENCODER, seed=0), bright_or_dark()
    head = head_of_another_model(examples)
    first, again, other = (
        finetune(
            copy.deepcopy(base), head, examples, Schedule(2, 32, 1e-3), generator=generator_for(s, "x")
        ).state_dict()
        for s in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["norm.weight"], other["norm.weight"])


def test_the_base_is_reproducible_and_learns():
    photographs = some_photographs(60)
    schedule = Schedule(1, 20, 3e-3)
    steps = []
    first = pretrain(TINY_ENCODER, photographs, schedule, seed=4, on_step=lambda: steps.append(1)).state_dict()
    again = pretrain(TINY_ENCODER, photographs, schedule, seed=4).state_dict()
    start = new_encoder(TINY_ENCODER, seed=4).state_dict()
    assert len(steps) == 6 * steps_of(schedule, 60) == 18
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["patch_proj.weight"], start["patch_proj.weight"])


def test_the_learning_rate_rises_then_falls_to_nearly_nothing():
    shares = [warm_cosine(step, 100) for step in range(100)]
    assert shares[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert shares[9:11] == [1.0, 1.0]
    assert shares[55] == pytest.approx(0.5)
    assert shares[99] < 0.001
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_one_thread_is_put_back_even_after_an_error():
    before = torch.get_num_threads()
    inside = []

    def fail():
        with one_thread():
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == before


def test_generators_are_told_apart_by_seed_and_purpose():
    draws = {tuple(torch.randint(1000, (4,), generator=generator_for(s, p)).tolist()) for s in (0, 1) for p in "ab"}
    assert len(draws) == 4
    assert torch.equal(torch.rand(2, generator=generator_for(0, "a")), torch.rand(2, generator=generator_for(0, "a")))
