"""Reinforcement learning: the library's loss against a naive formula, rewards that rise, the same weights twice."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
from evidence.tests.helpers.tolerances import F32_PRODUCT, F32_SOLVE
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat_experiments.harness.models import load_model
from actmat_experiments.harness.training import Schedule
from actmat_experiments.reasoning.small.model import (
    Size,
    SmallSettings,
    new_model,
    new_tokenizer,
    save_model,
)
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Puzzle
from actmat_experiments.reasoning.small.train import Run, answers, new_trainer, pretrain, reinforce, right_answers

SIZE = Size(16, 32, 1, 2)
QUICK = SmallSettings(steps=2, prompts=4, group=4)
LETTER = Puzzle(
    "letter",
    "any answer that begins with a letter of the first half",
    lambda: [f"say {i}=" for i in range(10, 60)],
    lambda prompt, draw: "a",
    lambda prompt, answer, draw: "z",
    lambda prompt, answer: "a" <= answer[:1] <= "m",
)


def naive_objective(model: Any, inputs: dict[str, Tensor], advantages_N: Tensor) -> Tensor:
    """`-1/N sum_i 1/|o_i| sum_t rho_it A_i`, one answer at a time; in a first step the ratio `rho` is 1, but its
    gradient is that of the log-probability, and nothing is clipped.
    """
    losses = []
    for i, advantage in enumerate(advantages_N):
        prompt_S = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        answer_S = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()]
        logits_SV = model(torch.cat([prompt_S, answer_S])[None]).logits[0]
        log_p_S = logits_SV.log_softmax(-1)[len(prompt_S) - 1 : -1].gather(1, answer_S[:, None])[:, 0]
        losses.append(-(torch.exp(log_p_S - log_p_S.detach()) * advantage).mean())
    return torch.stack(losses).mean()


def test_advantage_and_gradient_are_those_of_the_paper(tmp_path: Path) -> None:
    model, seen = new_model(SIZE, seed=0), []
    weights = list(model.parameters())
    with torch.random.fork_rng(devices=[]), one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = new_trainer(model, LETTER.right, LETTER.prompts(), QUICK.learning, Run(0, tmp_path))
        own = trainer.compute_loss

        def compute_loss(model: Any, inputs: dict[str, Tensor], *rest: Any, **more: Any) -> Any:
            loss = own(model, inputs, *rest, **more)
            gradient = torch.autograd.grad(loss, weights, retain_graph=True)
            texts = new_tokenizer().batch_decode(inputs["completion_ids"], skip_special_tokens=True)
            rewards_N = torch.tensor([float("a" <= t[:1] <= "m") for t in texts])
            advantages_N = torch.empty_like(rewards_N)
            for prompt_S in inputs["prompt_ids"].unique(dim=0):  # the library shuffles answers across groups
                group_N = (inputs["prompt_ids"] == prompt_S).all(1)
                assert int(group_N.sum()) == QUICK.group
                group = rewards_N[group_N]
                advantages_N[group_N] = (group - group.mean()) / (group.std() + 1e-4)
            naive = torch.autograd.grad(naive_objective(model, inputs, advantages_N), weights)
            seen.append((inputs["advantages"], advantages_N, gradient, naive))
            return loss

        trainer.compute_loss = compute_loss
        trainer.train()
    assert len(seen) == QUICK.steps
    for given, wanted, gradient, naive in seen:
        assert wanted.any(), "no group had answers of both kinds: nothing was tested"
        assert float((given - wanted).norm() / wanted.norm()) < F32_PRODUCT
        whole, apart = (torch.cat([g.flatten() for g in some]) for some in (naive, gradient))
        assert float((whole - apart).norm() / whole.norm()) < F32_SOLVE


def test_rewards_rise_and_the_same_seed_gives_the_same_expert(tmp_path: Path) -> None:
    settings = SmallSettings(steps=10, prompts=8, group=8, rate=3e-2)
    found, before = (
        [],
        right_answers(new_model(SIZE, seed=0).eval(), LETTER, LETTER.prompts(), 4, temperature=1.0, seed=0),
    )
    for _ in range(2):
        ticks: list[int] = []
        with one_thread():
            expert = reinforce(
                new_model(SIZE, seed=0),
                LETTER.right,
                LETTER.prompts(),
                settings.learning,
                Run(0, tmp_path),
                on_step=lambda ticks=ticks: ticks.append(1),
            )
        assert len(ticks) == 10
        found.append(expert)
    after = right_answers(found[0], LETTER, LETTER.prompts(), 4, temperature=1.0, seed=0)
    assert after.float().mean() > before.float().mean() + 0.2
    assert all(torch.equal(a, b) for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True))


def test_the_base_learns_to_write_answers() -> None:
    add = PUZZLES[0]
    ticks: list[int] = []
    with one_thread():
        model = pretrain(
            Size(32, 64, 1, 2),
            [(add, ["add 10+11=", "add 20+22="])],
            1.0,
            Schedule(60, 16, 1e-2),
            seed=0,
            on_step=lambda: ticks.append(1),
        )
    assert len(ticks) == 60
    right = right_answers(model, add, ["add 10+11=", "add 20+22="], 8, temperature=1.0, seed=0)
    assert right.float().mean() > 0.9


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    state = torch.get_rng_state()
    model = new_model(SIZE, seed=0)
    answers(model.eval(), ["add 10+11="], 2, temperature=1.0, seed=0)
    reinforce(model, LETTER.right, LETTER.prompts(), QUICK.learning, Run(0, tmp_path))
    assert torch.equal(torch.get_rng_state(), state)


def test_answers_follow_their_prompts_and_seed() -> None:
    model = new_model(SIZE, seed=0).eval()
    prompts = ["add 10+11=", "form 6 b2 k="]
    first = answers(model, prompts, 5, temperature=1.0, seed=3)
    assert [len(some) for some in first] == [5, 5]
    assert first == answers(model, prompts, 5, temperature=1.0, seed=3)
    assert first != answers(model, prompts, 5, temperature=1.0, seed=4)


def test_padding_changes_no_greedy_answer() -> None:
    model = new_model(SIZE, seed=0).eval()
    prompts = ["add 10+11=", "form 6 b2 k="]
    together = answers(model, prompts, 1, temperature=1e-4, seed=0)
    assert together == [answers(model, [p], 1, temperature=1e-4, seed=0)[0] for p in prompts]


def test_a_checkpoint_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    model = new_model(SIZE, seed=0)
    save_model(model, tmp_path)
    loaded = load_model("AutoModelForCausalLM", tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
