"""Answers of a tiny model by the harness's back end: counts, resuming, templates, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actmat.errors import MergeError
from actmat_experiments.reasoning import generate
from actmat_experiments.reasoning.benchmarks import Prompt, Sampling
from actmat_experiments.reasoning.generate import Engine, Job, Questions, answer_all, read_answers, release
from actmat_experiments.reasoning.small.model import Size, new_model, save_model

PROMPTS = [f"add {i}+{i}=" for i in range(10, 30)]
SAMPLED = Sampling(3, 1.0, 0.95, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(new_model(Size(16, 32, 1, 2), seed=0), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    release()
    yield
    release()


def job(model: Path, path: Path, sampling: Sampling = SAMPLED, prompts: list[str] = PROMPTS) -> Job:
    questions = Questions([Prompt(p) for p in prompts], sampling, path, batch_size=16)
    return Job(str(model), None, Engine(dtype="float32"), "cpu", 7, (questions,))


def test_every_prompt_gets_its_answers_once(model: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "answers.jsonl", []
    answer_all(job(model, path), seen.append)
    found = read_answers(path)
    assert [len(some) for some in found] == [3] * 20
    assert sum(seen) == 20
    assert len({a for some in found for a in some}) > 10
    assert all(len(a) <= 6 for some in found for a in some)
    before = path.read_text()
    answer_all(job(model, path))
    assert path.read_text() == before


def test_an_interrupted_run_ends_with_the_same_answers(model: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    answer_all(job(model, whole))
    lines = whole.read_text().splitlines(keepends=True)
    for kept in ("".join(lines[:5]), "".join(lines[:16]) + lines[16][:7], lines[0][:3], "".join(lines)):
        cut.write_text(kept)
        answer_all(job(model, cut))
        assert cut.read_text() == whole.read_text()


def test_the_seed_decides(model: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((7, 7, 8)):
        path = tmp_path / f"{number}.jsonl"
        answer_all(replace(job(model, path, prompts=PROMPTS[:4]), seed=seed))
        found.append(path.read_text())
    assert found[0] == found[1] != found[2]


def test_answers_end_at_stops(model: Path, tmp_path: Path) -> None:
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    path = tmp_path / "answers.jsonl"
    answer_all(job(model, path, replace(SAMPLED, stops=letters), PROMPTS[:4]))
    assert not any(set(a) & set(letters) for some in read_answers(path) for a in some)


def test_a_missing_problem_in_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"problem": 0, "answers": []}\n{"problem": 2, "answers": []}\n')
    with pytest.raises(MergeError, match="problem 1"):
        read_answers(path)
    assert read_answers(tmp_path / "none") == []


def test_answers_longer_than_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="max_tokens"):
        answer_all(job(model, tmp_path / "answers.jsonl", replace(SAMPLED, max_tokens=4096)))


def test_prompts_that_leave_too_little_for_the_answer_are_refused_and_not_cut(model: Path, tmp_path: Path) -> None:
    asked = replace(SAMPLED, n=1, max_tokens=4)
    path = tmp_path / "answers.jsonl"
    whole = replace(job(model, path, asked, ["ab", "a" * 40]), engine=Engine(dtype="float32", longest=44))
    answer_all(whole)
    assert [len(some) for some in read_answers(path)] == [1, 1]
    path.unlink()
    with pytest.raises(MergeError, match="takes 43 tokens, but prompts of up to 40 and answers of up to 4"):
        answer_all(replace(whole, engine=Engine(dtype="float32", longest=43)))
    assert not read_answers(path)


def test_a_back_end_without_a_library_of_its_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.api.registry

    def broken(**settings: Any) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(lm_eval.api.registry, "get_model", lambda name: broken)
    with pytest.raises(MergeError, match="libcudart"):
        answer_all(Job("m", None, Engine("vllm"), "cuda", 0, (Questions([Prompt("p")], SAMPLED, tmp_path / "a"),)))


class Recording:
    """A back end that repeats what it is asked."""

    max_length = 4096

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def tok_encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        return f"<user>{messages[0]['content']}"

    def generate_until(self, requests: list[Any], disable_tqdm: bool) -> list[str]:
        return [json.dumps([r.args[0], r.args[1], self.settings]) for r in requests]


def test_prompts_and_settings_reach_the_back_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.api.registry

    monkeypatch.setattr(lm_eval.api.registry, "get_model", lambda name: Recording)
    questions = Questions([Prompt("p", "begun")] * 2, SAMPLED, tmp_path / "a.jsonl")
    engine = Engine("vllm", longest=99, tensor_parallel=2, data_parallel=4, memory_fraction=0.5)
    answer_all(Job("m", "tokens", engine, "cuda", 7, (questions,)))
    found = [json.loads(answer) for some in read_answers(tmp_path / "a.jsonl") for answer in some]
    prompt, how, settings = found[0]
    assert prompt == "<user>pbegun"
    seeds = [how.pop("seed") for _, how, _ in found]
    assert how == {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": -1}
    assert len(set(seeds)) == 6, "every answer has a seed of its own, which does not depend on what is asked beside it"
    assert settings == {
        "pretrained": "m",
        "tokenizer": "tokens",
        "dtype": "bfloat16",
        "max_length": 99,
        "seed": 7,
        "batch_size": "auto",
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "gpu_memory_utilization": 0.5,
    }


def test_an_answer_of_vllm_has_the_same_seed_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.api.registry

    monkeypatch.setattr(lm_eval.api.registry, "get_model", lambda name: Recording)
    path = tmp_path / "a.jsonl"
    asked = Job("m", None, Engine("vllm"), "cuda", 7, (Questions([Prompt(p) for p in PROMPTS], SAMPLED, path),))
    answer_all(asked)
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:17]))
    answer_all(asked)
    assert path.read_text() == whole
    assert generate._load.cache_info().misses == 1, "a model is loaded once"
