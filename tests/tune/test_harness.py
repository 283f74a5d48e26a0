"""Scores on benchmarks: lm-eval itself on a task of a local file, and its results in other forms by a stand-in."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.family import data_flags, model_flags
from tests.helpers.merging import actmat as run

from actmat.errors import RecipeError
from actmat.extras.models.loading import load_model
from actmat.extras.tune import harness
from actmat.extras.tune.harness import LmEval

KNOWN = ["mmlu", "gsm8k", "wiki"]
QUESTIONS = [("one two", ["three", "def", "x"], 0), ("for i in", ["x", "seven"], 0), ("while", ["two", "x"], 1)]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of multiple choice, as its YAML file for lm-eval."""
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "words.yaml").write_text(
        f"""task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "questions.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
    )
    return tmp_path / "words.yaml"


def naive_accuracy(place: Path, count: int) -> float:
    """Share of questions whose right choice has the largest sum of log-probabilities, one forward pass each."""
    from transformers import AutoTokenizer

    model: Any = load_model(str(place), model_class="LlamaForCausalLM").model
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    right = 0
    for question, choices, answer in QUESTIONS[:count]:
        scores = []
        for choice in choices:
            start = tokenizer(question, add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(log_p[i - 1, ids[i]]) for i in range(len(start), len(ids))))
        right += scores.index(max(scores)) == answer
    return right / count


def test_a_search_by_a_benchmark(family: Path, tmp_path: Path, task: Path) -> None:
    """lm-eval itself, on the candidates in memory; what is written scores what the search says."""
    out = tmp_path / "best"
    command = ["tune", *model_flags(family), *data_flags(family), "--out", str(out), "--methods", "average,tsv"]
    more = ["--scales", "0.5,1", "--set", "new_tokens=2", "--budget", "6", "--dtype", "float32"]
    done = run([*command, *more, "--score", f"lm-eval:{task}", "--set", "limit=3"], code=0)
    assert "it/s" not in done.err, "no bars of lm-eval"
    told = json.loads((tmp_path / "best.tune" / "tune.json").read_text())
    assert told["score"] == f"lm-eval:{task} limit 3"
    assert told["compared"] == "divergence"
    assert "divergence (chosen by lm-eval:" in done.words
    assert set(told["chosen"]["losses"]) == {"words"}
    assert told["chosen"]["losses"]["words"] == pytest.approx(-naive_accuracy(out, 3))
    scored = LmEval([str(task)], str(out), limit=3)
    before = torch.random.get_rng_state()
    base = load_model(str(family / "base"), model_class="LlamaForCausalLM").model
    assert scored.losses(base)["words"] == pytest.approx(-naive_accuracy(family / "base", 3))
    assert torch.equal(torch.random.get_rng_state(), before)


class StandIn:
    """`lm_eval` as far as it is called, with results of all forms."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.asked: list[dict[str, Any]] = []
        self.all_tasks = KNOWN
        self.modules: dict[str, Any] = {
            "lm_eval.evaluator": self,
            "lm_eval.tasks": SimpleNamespace(TaskManager=lambda **_: self),
            "lm_eval.models.huggingface": SimpleNamespace(HFLM=lambda **given: given),
            "transformers": SimpleNamespace(AutoTokenizer=self),
        }

    def from_pretrained(self, place: str) -> Any:
        return SimpleNamespace(
            pad_token=None, eos_token="</s>", unk_token=None, get_vocab=lambda: {"</s>": 0}, place=place
        )

    def load(self, tasks: list[str]) -> dict[str, Any]:
        return {"tasks": {t: StandInTask(num_fewshot=5 if t == "mmlu" else None) for t in tasks}}

    def evaluate(self, model: Any, tasks: dict[str, Any], **given: Any) -> dict[str, Any]:
        self.asked.append({"model": model, "tasks": tasks["tasks"], **given})
        return self.found


class StandInTask(dict[str, Any]):
    get_config = dict.get

    def set_config(self, *, key: str, value: Any) -> None:
        self[key] = value

    def set_fewshot_seed(self, *, seed: int) -> None:
        self["seed"] = seed


def scored(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], tasks: list[str], **fields: Any
) -> tuple[Any, StandIn]:
    stand_in = StandIn(found)
    monkeypatch.setattr(harness, "_imported", stand_in.modules.__getitem__)
    return LmEval(tasks, "base", **fields).losses(torch.nn.Linear(1, 1)), stand_in


def test_groups_count_once_and_smaller_perplexity_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "results": {
            "mmlu": {"acc,none": 0.4, "acc_stderr,none": 0.1, "alias": "mmlu"},
            "mmlu_law": {"acc,none": 0.3, "alias": "law"},
            "gsm8k": {"alias": "gsm8k", "exact_match,strict": 0.25, "exact_match,flexible": 0.5},
            "wiki": {"word_perplexity,none": 12.5, "alias": "wiki"},
        },
        "groups": {"mmlu": {"acc,none": 0.4}},
        "group_subtasks": {"mmlu": ["mmlu_law"]},
        "higher_is_better": {"mmlu": {"acc": True}, "gsm8k": {"exact_match": True}, "wiki": {"word_perplexity": False}},
    }
    losses, stand_in = scored(monkeypatch, found, ["mmlu", "gsm8k", "wiki"], limit=10)
    assert losses == {"mmlu": -0.4, "gsm8k": -0.25, "wiki": 12.5}
    (asked,) = stand_in.asked
    assert asked["limit"] == 10
    assert {name: (t["num_fewshot"], t["seed"]) for name, t in asked["tasks"].items()} == {
        "mmlu": (5, 1234), "gsm8k": (0, 1234), "wiki": (0, 1234)
    }  # fmt: skip
    assert asked["model"]["tokenizer"].pad_token == "</s>"
    _, stand_in = scored(monkeypatch, found, ["gsm8k"])
    assert stand_in.asked[0]["limit"] is None


def test_what_cannot_be_scored_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="'gsm8k'"):
        scored(monkeypatch, {}, ["gsm8kk"])
    with pytest.raises(RecipeError, match="No task given"):
        LmEval([], "base")
    with pytest.raises(RecipeError, match="returned no number for gsm8k"):
        scored(monkeypatch, {"results": {}}, ["gsm8k"])


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, family: Path) -> None:
    for name in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, name, None)
    command = ["tune", *model_flags(family), "--data", "x.jsonl", "--out", "x"]
    done = run([*command, "--score", "lm-eval:gsm8k"], code=1)
    assert "actmat[lm-eval]" in done.err
    done = run([*command, "--set", "limit=3"], code=2)
    assert "limit needs" in done.err
