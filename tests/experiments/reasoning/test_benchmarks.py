"""Benchmarks: data found, prompts built, answers marked as by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat_experiments.reasoning.benchmarks import BENCHMARKS, get_benchmarks

DATA = Path(__file__).parent / "data"
BY_NAME = {b.name: b for b in BENCHMARKS}


def test_the_papers_sampling() -> None:
    code, aime = BY_NAME["humaneval"].sampling, BY_NAME["aime24"].sampling
    assert (code.n, code.temperature, code.top_p, BY_NAME["humaneval_plus"].ks) == (20, 0.8, 0.95, (1, 10))
    assert (aime.n, aime.temperature, aime.top_p, aime.max_tokens, BY_NAME["aime25"].ks) == (
        32,
        0.6,
        0.95,
        16384,
        (1, 32),
    )
    assert BY_NAME["ifeval"].sampling.temperature == 0.0


@pytest.mark.parametrize("name", ["humaneval", "aime24", "aime25", "ifeval", "gsm8k"])
def test_local_copies_are_read_and_make_prompts(name: str) -> None:
    problems = BY_NAME[name].load(DATA)
    assert problems
    assert all(BY_NAME[name].prompt(p).strip() for p in problems)


def test_a_gzipped_copy_is_read(tmp_path: Path) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress((DATA / "HumanEval.jsonl").read_bytes()))
    assert BY_NAME["humaneval"].load(tmp_path) == BY_NAME["humaneval"].load(DATA)


def test_a_missing_or_broken_copy_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"HumanEvalPlus-OriginFmt\.jsonl\.gz or .* or HumanEvalPlus\.jsonl\."):
        BY_NAME["humaneval_plus"].load(DATA)
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": ')
    with pytest.raises(CheckpointError, match="no file of JSON lines"):
        BY_NAME["gsm8k"].load(tmp_path)
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(CheckpointError, match="no file of JSON lines"):
        BY_NAME["humaneval"].load(tmp_path)


def test_problems_that_lack_a_field_are_told_with_the_file_that_has_it(tmp_path: Path) -> None:
    """EvalPlus releases two files: one with inputs for its own program, one with a test per problem."""
    inputs = {"prompt": "def f(x):\n", "entry_point": "f", "base_input": [[1]], "plus_input": [[2]]}
    (tmp_path / "HumanEvalPlus.jsonl").write_text("\n".join(json.dumps(inputs) for _ in range(3)))
    with pytest.raises(CheckpointError, match="take HumanEvalPlus-OriginFmt") as caught:
        BY_NAME["humaneval_plus"].load(tmp_path)
    assert list(caught.value.problems) == ["'test' is missing in 3 of 3"]
    (tmp_path / "HumanEvalPlus-OriginFmt.jsonl").write_text(json.dumps(inputs | {"test": "def check(f):\n    pass\n"}))
    assert len(BY_NAME["humaneval_plus"].load(tmp_path)) == 1
    (tmp_path / "aime24.jsonl").write_text('{"ID": "2024-I-1", "Problem": "1 + 1", "Answer": 2}\n{"Problem": "2"}')
    with pytest.raises(CheckpointError) as caught:
        BY_NAME["aime24"].load(tmp_path)
    assert list(caught.value.problems) == ["'answer' is missing in 1 of 2"]
    (tmp_path / "gsm8k_test.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="0 problems of GSM8K"):
        BY_NAME["gsm8k"].load(tmp_path)


PLUS = """
import numpy as np

def same(found, wanted, atol):
    if atol:
        assert np.allclose(found, wanted, rtol=1e-07, atol=atol)
    else:
        assert found == wanted, (found, wanted)

def check(candidate):
    for given, wanted in zip([[[1.0, 2.0]], [[4.0]]], [1.5, 4.0]):
        same(candidate(*given), wanted, 1e-6)
"""


@pytest.mark.parametrize(("body", "passes"), [("sum(xs) / len(xs)", True), ("sum(xs) / 2", False)])
def test_tests_of_the_extended_benchmark_may_use_numpy(body: str, passes: bool) -> None:
    """Its tests compare arrays by numpy, which must load within the limits of the fence."""
    plus = BY_NAME["humaneval_plus"]
    try:
        plus.ready([])
    except MergeError as error:
        pytest.skip(str(error))
    problem = {"prompt": "def mean(xs):\n", "entry_point": "mean", "test": PLUS}
    assert plus.mark(problem, f"    return {body}\n", "olmes") == {"humaneval_plus": passes}


def test_unknown_benchmarks_are_named_together() -> None:
    with pytest.raises(RecipeError) as caught:
        get_benchmarks(["humanevel", "aime", "gsm8k"])
    assert len(caught.value.problems) == 2
    assert [b.name for b in get_benchmarks(["gsm8k", "humaneval"])] == ["humaneval", "gsm8k"]


@pytest.mark.parametrize("place", [0, 1])
def test_the_published_solution_passes_and_a_wrong_one_does_not(place: int) -> None:
    humaneval = BY_NAME["humaneval"]
    try:
        humaneval.ready([])
    except MergeError as error:
        pytest.skip(str(error))
    problem = humaneval.load(DATA)[place]
    right = problem["canonical_solution"]
    assert humaneval.mark(problem, right, "plain") == {"humaneval": True}
    assert humaneval.mark(problem, right + "\n\ndef more():\n    left unfinished (", "plain") == {"humaneval": True}
    assert humaneval.mark(problem, f"```python\n{problem['prompt']}{right}```", "plain") == {"humaneval": True}
    assert humaneval.mark(problem, "    return None\n", "plain") == {"humaneval": False}
    assert humaneval.mark(problem, "    import os; os._exit(0)\n", "plain") == {"humaneval": False}
    assert humaneval.mark(problem, "", "plain") == {"humaneval": False}


def test_aime_is_marked_with_either_spelling_of_its_fields() -> None:
    first, second = BY_NAME["aime24"].load(DATA)
    assert BY_NAME["aime24"].mark(first, r"\boxed{001}", "olmes") == {"aime24": True}
    assert BY_NAME["aime24"].mark(second, r"\boxed{33}", "olmes") == {"aime24": True}
    assert BY_NAME["aime24"].mark(second, r"33", "olmes") == {"aime24": False}
    (third,) = BY_NAME["aime25"].load(DATA)
    assert BY_NAME["aime25"].mark(third, r"the answer is 12", "plain") == {"aime25": True}
    assert "Find $3" in BY_NAME["aime25"].prompt(third)


def test_gsm8k_is_marked_strictly_and_flexibly() -> None:
    problem = BY_NAME["gsm8k"].load(DATA)[0]

    def mark(problem: dict, answer: str) -> dict:
        return BY_NAME["gsm8k"].mark(problem, answer, "chat")

    assert mark(problem, problem["answer"]) == {"gsm8k": True, "gsm8k-strict": True}
    assert mark(problem, "that makes $18.00") == {"gsm8k": True, "gsm8k-strict": False}
    assert mark(problem, "#### 18 and not 17") == {"gsm8k": False, "gsm8k-strict": True}
    assert mark(problem, "no idea") == {"gsm8k": False, "gsm8k-strict": False}


def test_ifeval_counts_whole_prompts_loosely_and_strictly() -> None:
    problem = next(p for p in BY_NAME["ifeval"].load(DATA) if p["key"] == 1001)
    assert BY_NAME["ifeval"].mark(problem, "Yes, here:\nno comma", "olmes") == {"ifeval": True, "ifeval-strict": False}


def test_every_benchmark_belongs_to_an_expert() -> None:
    assert {b.skill for b in BENCHMARKS} == {"math", "code", "instructions"}
    assert json.dumps([b.hub for b in BENCHMARKS])


def test_the_papers_format_asks_as_its_configurations_say() -> None:
    problem = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(f):\n    assert f(1) == 2\n"}
    code = BY_NAME["humaneval"]
    asked, sampled = code.prompt_in("olmes", problem), code.sampling_in("olmes")
    assert asked.chat
    assert asked.text.endswith(problem["prompt"])
    assert asked.begun == "Here is the completed function:\n\n```python\ndef f(x):\n"
    assert (sampled.n, sampled.temperature, sampled.top_p) == (20, 0.8, 0.95)
    assert sampled.stops == ("\nclass", "\nif", "\nprint", "\n#", "\n```", "\n```\n\n", "<|eot_id|>")
    (aime,) = BY_NAME["aime25"].load(DATA)
    assert BY_NAME["aime25"].prompt_in("olmes", aime).text.endswith("put your final answer within \\boxed{}.")
    assert BY_NAME["aime25"].sampling_in("olmes").stops == ()
    ifeval = BY_NAME["ifeval"]
    assert ifeval.prompt_in("olmes", {"prompt": "Say hello."}).text == "Say hello."
    assert ifeval.sampling_in("olmes").max_tokens == 2048


def test_an_answer_in_the_papers_format_continues_the_function() -> None:
    code = BY_NAME["humaneval"]
    try:
        code.ready([])
    except MergeError as error:
        pytest.skip(str(error))
    problem = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(f):\n    assert f(1) == 2\n"}
    assert code.mark(problem, "    return x + 1", "olmes") == {"humaneval": True}
    fenced = "Sure:\n\n```python\ndef f(x):\n    return x + 1\n```\nDone."
    assert code.mark(problem, fenced, "chat") == {"humaneval": True}
    assert code.mark(problem, fenced, "olmes") == {"humaneval": False}


@pytest.mark.parametrize("form", ["olmes", "plain", "chat"])
def test_only_text_that_is_continued_ends_at_stop_strings(form: str) -> None:
    for benchmark in BENCHMARKS:
        stops = benchmark.sampling_in(form).stops
        assert form != "chat" or stops == ()
        assert form != "plain" or stops == benchmark.sampling.stops
        assert form == "plain" or "\ndef" not in stops, "a fenced answer would end before its function"


def test_problems_of_a_year_are_chosen_by_column_or_address() -> None:
    chosen = BY_NAME["aime24"].chosen
    page = "https://artofproblemsolving.com/wiki/index.php/{}_AIME_I_Problems/Problem_1"
    assert chosen({"year": 2024})
    assert not chosen({"year": 2025})
    assert [y for y in (2023, 2024, 2025) if chosen({"url": page.format(y)})] == [2024]
