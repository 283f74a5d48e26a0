"""Benchmarks: data found, prompts built, answers marked as by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from actmat.errors import CheckpointError, RecipeError
from actmat_experiments.reasoning.benchmarks import BENCHMARKS, Sampling, get_benchmarks

DATA = Path(__file__).parent / "data"
BY_NAME = {b.name: b for b in BENCHMARKS}


@pytest.mark.parametrize("name", ["humaneval", "aime24", "aime25", "ifeval"])
def test_local_copies_are_read_and_make_prompts(name: str) -> None:
    problems = BY_NAME[name].load(DATA)
    assert problems
    assert all(BY_NAME[name].prompt(p).text.strip() for p in problems)


def test_a_gzipped_copy_is_read(tmp_path: Path) -> None:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress((DATA / "HumanEval.jsonl").read_bytes()))
    assert BY_NAME["humaneval"].load(tmp_path) == BY_NAME["humaneval"].load(DATA)


def test_a_missing_or_broken_copy_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"HumanEvalPlus-OriginFmt\.jsonl\.gz or .* or HumanEvalPlus\.jsonl\."):
        BY_NAME["humaneval_plus"].load(DATA)
    (tmp_path / "aime24.jsonl").write_text('{"problem": ')
    with pytest.raises(CheckpointError, match="no file of JSON lines"):
        BY_NAME["aime24"].load(tmp_path)
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
    (tmp_path / "aime24.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="0 problems of AIME 24"):
        BY_NAME["aime24"].load(tmp_path)


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
def test_tests_of_the_extended_benchmark_may_use_numpy(body: str, passes: bool, fenced: None) -> None:
    """Its tests compare arrays by numpy, which must load within the limits of the fence."""
    plus = BY_NAME["humaneval_plus"]
    problem = {"prompt": "def mean(xs):\n", "entry_point": "mean", "test": PLUS}
    assert plus.mark(problem, f"    return {body}\n") == {"humaneval_plus": passes}


def test_unknown_benchmarks_are_named_together() -> None:
    with pytest.raises(RecipeError) as caught:
        get_benchmarks(["humanevel", "aime", "ifeval"])
    assert len(caught.value.problems) == 2
    assert [b.name for b in get_benchmarks(["ifeval", "humaneval"])] == ["humaneval", "ifeval"]


@pytest.mark.parametrize("place", [0, 1])
def test_the_published_solution_passes_and_a_wrong_one_does_not(place: int, fenced: None) -> None:
    humaneval = BY_NAME["humaneval"]
    problem = humaneval.load(DATA)[place]
    right = problem["canonical_solution"]
    assert humaneval.mark(problem, right) == {"humaneval": True}
    fenced = f"```python\n{problem['prompt']}{right}```"  # the answer was begun with the prompt: this is no Python
    for wrong in (fenced, "    return None\n", "    import os; os._exit(0)\n", ""):
        assert humaneval.mark(problem, wrong) == {"humaneval": False}, wrong


def test_aime_is_marked_with_either_spelling_of_its_fields() -> None:
    first, second = BY_NAME["aime24"].load(DATA)
    assert BY_NAME["aime24"].mark(first, r"\boxed{001}") == {"aime24": True}
    assert BY_NAME["aime24"].mark(second, r"\boxed{33}") == {"aime24": True}
    assert BY_NAME["aime24"].mark(second, r"33") == {"aime24": False}
    (third,) = BY_NAME["aime25"].load(DATA)
    assert BY_NAME["aime25"].mark(third, r"the answer is 12") == {"aime25": True}
    assert "Find $3" in BY_NAME["aime25"].prompt(third).text


def test_ifeval_counts_whole_prompts_loosely_and_strictly() -> None:
    problem = next(p for p in BY_NAME["ifeval"].load(DATA) if p["key"] == 1001)
    assert BY_NAME["ifeval"].mark(problem, "Yes, here:\nno comma") == {"ifeval": True, "ifeval-strict": False}


def test_prompts_and_sampling_are_those_of_the_papers_configurations() -> None:
    problem = {"prompt": "def f(x):\n"}
    code = BY_NAME["humaneval"]
    asked, sampled = code.prompt(problem), code.sampling
    assert asked.text.endswith(problem["prompt"])
    assert asked.begun == "Here is the completed function:\n\n```python\ndef f(x):\n"
    assert (sampled.n, sampled.temperature, sampled.top_p) == (20, 0.8, 0.95)
    assert sampled.stops == ("\nclass", "\nif", "\nprint", "\n#", "\n```", "\n```\n\n", "<|eot_id|>")
    assert BY_NAME["humaneval_plus"].ks == (1, 10)
    aime, (problem,) = BY_NAME["aime25"], BY_NAME["aime25"].load(DATA)
    assert aime.prompt(problem).text.endswith("put your final answer within \\boxed{}.")
    assert (aime.sampling, aime.ks) == (Sampling(32, 0.6, 0.95, 16384), (1, 32))
    ifeval = BY_NAME["ifeval"]
    assert ifeval.prompt({"prompt": "Say hello."}).text == "Say hello."
    assert (ifeval.sampling.temperature, ifeval.sampling.max_tokens) == (0.0, 2048)


def test_problems_of_a_year_are_chosen_by_column_or_address() -> None:
    chosen = BY_NAME["aime24"].chosen
    page = "https://artofproblemsolving.com/wiki/index.php/{}_AIME_I_Problems/Problem_1"
    assert chosen({"year": 2024})
    assert not chosen({"year": 2025})
    assert [y for y in (2023, 2024, 2025) if chosen({"url": page.format(y)})] == [2024]
