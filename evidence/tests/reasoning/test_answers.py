"""Answers of the reasoning tasks: drawn, extracted, judged and counted; the published figures."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmat.errors import MergeError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.progress import Watch
from actmat_experiments.reasoning import marks
from actmat_experiments.reasoning.benchmarks import get_benchmarks
from actmat_experiments.reasoning.evaluate import unsolvable
from actmat_experiments.reasoning.marks import aime_answer, check_sentence_model, followed
from actmat_experiments.reasoning.passk import estimate, pass_at_k
from actmat_experiments.reasoning.small.model import LONGEST, new_tokenizer
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Puzzle, split, unreliable
from actmat_experiments.reasoning.small.train import LONGEST_ANSWER

# Published solutions against their own tests: what no model can get right is named.


HUMANEVAL, PLUS = get_benchmarks(["humaneval", "humaneval_plus"])
DATA = Path(__file__).parent / "data"


def problem(number: int, test: str) -> dict[str, Any]:
    solution = "    return float(sum(xs))\n"
    known = {"task_id": f"Made/{number}", "prompt": "def total(xs):\n", "canonical_solution": solution}
    return known | {"entry_point": "total", "test": test}


def test_problems_that_nobody_can_solve_are_named_once(
    fenced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starred = "def check(candidate):\n    assert sum(*candidate([1])) <= 1\n"  # a number is no list of arguments
    problems = [problem(0, "def check(candidate):\n    assert candidate([1, 2]) == 3\n"), problem(1, starred)]
    problems.append({k: v for k, v in problem(2, starred).items() if k != "canonical_solution"})
    with Watch(None, tmp_path / "logs") as watch:
        for _ in range(2):
            assert unsolvable(PLUS, problems, Cache(tmp_path), watch, threads=2) == ["Made/1"]
        (stored,) = tmp_path.rglob("failing.json")
        assert json.loads(stored.read_text()) == ["Made/1"]
        assert unsolvable(PLUS, problems[:1], Cache(tmp_path), watch, threads=None) == []


def test_the_published_problems_here_can_be_solved(fenced: None, tmp_path: Path) -> None:
    with Watch(None, tmp_path / "logs") as watch:
        assert unsolvable(HUMANEVAL, HUMANEVAL.load(DATA), Cache(tmp_path), watch, threads=2) == []


# pass@k against binomials, and its interval.


@given(st.integers(1, 400), st.data())
def test_the_product_is_the_quotient_of_binomials(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


def test_large_numbers_neither_overflow_nor_cancel() -> None:
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(100_000, 50_000, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(n, c, k)


def test_the_estimate_is_the_mean_over_problems_with_the_spread_between_them() -> None:
    found = estimate([0, 2, 4, 4], 4, 1)
    assert found.interval.value == pytest.approx(0.625)
    spread = (sum((x - 0.625) ** 2 for x in (0, 0.5, 1, 1)) / 3) ** 0.5
    assert found.interval.low == pytest.approx(0.625 - 1.959964 * spread / 2)
    assert found.interval.high == 1.0
    assert (found.k, found.n_problems, found.n_samples) == (1, 4, 4)


def test_equal_problems_do_not_make_a_point() -> None:
    nothing = estimate([0] * 10, 4, 1).interval
    assert (nothing.value, nothing.low) == (0.0, 0.0)
    assert 0.2 < nothing.high < 0.35
    assert (estimate([2], 4, 1).interval.low, estimate([2], 4, 1).interval.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no problems"):
        estimate([], 4, 1)


# The tasks of the small suite: verifiers agree with naive ones, spoilt answers are wrong, parts are disjoint.


BY_NAME = {p.name: p for p in PUZZLES}


@pytest.fixture(params=PUZZLES, ids=lambda p: p.name)
def puzzle(request: pytest.FixtureRequest) -> Puzzle:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "right"),
    [
        ("add", "add 47+38=", "85", True),
        ("add", "add 47+38=", "085", False),
        ("add", "add 99+99=", "198", True),
        ("add", "add 47+38=", "", False),
        ("sort", "sort 83172=", "12378", True),
        ("sort", "sort 83172=", "12387", False),
        ("sort", "sort 83172=", "1237", False),
        ("form", "form 6 b2 k=", "kbacbd", True),
        ("form", "form 6 b2 k=", "kbbbcd", False),
        ("form", "form 6 b2 k=", "bkbacd", False),
        ("form", "form 6 b2 k=", "kbacb", False),
        ("form", "form 6 b2 k=", "kb1cbd", False),
        ("form", "form 4 a3 k=", "kaaa", True),
    ],
)
def test_verdicts_by_hand(name: str, prompt: str, answer: str, right: bool) -> None:
    assert BY_NAME[name].right(prompt, answer) is right


def test_answers_are_right_and_spoilt_ones_wrong(puzzle: Puzzle) -> None:
    draw = random.Random(0)
    for prompt in draw.sample(puzzle.prompts(), 300):
        answer = puzzle.answer(prompt, draw)
        assert puzzle.right(prompt, answer)
        spoilt = puzzle.spoil(prompt, answer, draw)
        assert not puzzle.right(prompt, spoilt), (prompt, answer, spoilt)
        assert abs(len(spoilt) - len(answer)) <= 1


def test_text_is_as_unreliable_as_it_was_told(puzzle: Puzzle) -> None:
    draw = random.Random(1)
    prompts = draw.choices(puzzle.prompts(), k=2000)
    right = sum(puzzle.right(p, unreliable(puzzle, p, 0.3, draw)) for p in prompts)
    assert 0.3 * 2000 - 4 * 20.5 < right < 0.3 * 2000 + 4 * 20.5


def test_parts_are_disjoint_whole_and_drawn_from_the_seed(puzzle: Puzzle) -> None:
    parts = split(puzzle, 64, 200, seed=0)
    everything = [*parts.train, *parts.validation, *parts.test]
    assert Counter(everything) == Counter(puzzle.prompts())
    assert max(Counter(everything).values()) == 1
    assert (len(parts.validation), len(parts.test)) == (64, 200)
    assert split(puzzle, 64, 200, seed=0) == parts
    assert split(puzzle, 64, 200, seed=1) != parts


def test_every_text_survives_the_tokenizer(puzzle: Puzzle) -> None:
    tokenizer, draw = new_tokenizer(), random.Random(2)
    for prompt in draw.sample(puzzle.prompts(), 50):
        answer = puzzle.answer(prompt, draw)
        tokens = tokenizer(prompt + answer + tokenizer.eos_token).input_ids
        assert tokenizer.decode(tokens, skip_special_tokens=True) == prompt + answer
        assert tokenizer.unk_token_id not in tokens
        assert tokens[-1] == tokenizer.eos_token_id
        assert len(tokens) <= LONGEST
        assert len(answer) + 1 <= LONGEST_ANSWER


# Answers taken out of texts, against answers read by hand.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{33}.", 33),
        (r"\boxed{ 7 }", 7),
        (r"$\boxed{\text{204}}$", 204),
        (r"\boxed{\mathbf{12}}", 12),
        (r"\boxed{x = 25}", 25),
        (r"\boxed{25.}", 25),
        (r"\boxed 7", 7),
        (r"\fbox{81}", 81),
        (r"first \boxed{1}, no: \boxed{2}", 2),
        (r"\boxed{2} and then \boxed{none}", 2),
        (r"\boxed{\boxed{5}}", 5),
        (r"\boxed{60^\circ}", 60),
        (r"$\boxed{60^{\circ}}$", 60),
        ("\\boxed{70°}", 70),
        (r"\boxed{12\text{ cm}}", 12),
        (r"\boxed{25\,\text{cm}^2}", 25),
        (r"\boxed{12\ \mathrm{cm}^{3}}", 12),
        (r"\boxed{204 minutes}", 204),
        (r"\boxed{204\%}", 204),
        (r"\boxed{\$25}", 25),
        (r"\boxed{25.0}", 25),
        (r"\boxed{AB = 60.00\text{ units}}", 60),
        ("The answer is 42.", 42),
        ("The final answer is: **042**", 42),
        ("Answer: $17$", 17),
        ("The answer is 3. Wait. The answer is 4", 4),
        (r"The answer is 3, but \boxed{4}", 4),
    ],
)
def test_an_answer_is_found(text: str, answer: int) -> None:
    assert aime_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "there are 12 cases, and 13 more",
        r"\boxed{1000}",
        r"\boxed{-1}",
        r"\boxed{3.5}",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{",
        r"\boxed{12",
        r"\boxed{n^2}",
        r"\boxed{12n}",
        r"\boxed{12\pi}",
        r"\boxed{3\sqrt{2}}",
        r"\boxed{2 or 3 solutions}",
        r"\boxed{12.5\text{ cm}}",
        r"\boxed{1000^\circ}",
        "The answer is 1000",
    ],
)
def test_no_answer_is_invented(text: str) -> None:
    assert aime_answer(text) is None


@given(st.integers(0, 999), st.text(alphabet="abc {}$\\.\n0123456789", max_size=40))
def test_every_boxed_integer_is_read_whatever_stands_before(number: int, before: str) -> None:
    assert aime_answer(f"{before} \\boxed{{{number:03d}}}") == number


@given(st.text(max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    found = aime_answer(text)
    assert found is None or 0 <= found <= 999


# IFEval on excerpts: answers that follow by the letter, only loosely, or not.


IFEVAL_DATA = Path(__file__).parent / "data" / "IFEval_input_data.jsonl"
PROBLEMS = {p["key"]: p for p in map(json.loads, IFEVAL_DATA.read_text().splitlines())}


@pytest.mark.parametrize(
    ("key", "answer", "strict", "loose"),
    [
        (1001, "A journey to Kyoto and no more", (True,), (True,)),
        (1001, "First Tokyo, then Kyoto", (False,), (False,)),
        (1001, "Sure, here it is:\nTo Kyoto thou shalt go", (False,), (True,)),
        (1001, "To Kyoto thou shalt go\nFare thee well, friend", (False,), (True,)),
        (1001, "", (False,), (False,)),
        (1001, "  \n ", (False,), (False,)),
        (1019, "are the two young boys playing with the horns in the garden?", (True,), (True,)),
        (1019, "Are the two young boys playing with the horns?", (False,), (False,)),
        (1075, '{"title": "Diapers"}', (True,), (True,)),
        (1075, 'Here you are:\n{"title": "Diapers"}', (False,), (True,)),
        (1075, "no JSON at all", (False,), (False,)),
        (1286, "\n".join(f"* point {i}" for i in range(6)), (True,), (True,)),
        (1286, "\n".join(f"* point {i}" for i in range(5)), (False,), (False,)),
        (1286, "\n".join(f"* point {i}" for i in range(7)), (False,), (True,)),
    ],
)
def test_answers_are_judged_as_by_hand(key: int, answer: str, strict: tuple[bool], loose: tuple[bool]) -> None:
    found = followed(PROBLEMS[key], answer)
    assert found.strict == strict
    assert found.loose == loose


def test_every_instruction_is_judged_for_itself() -> None:
    poem = "SECTION 1\na\nSECTION 2\nb\nSECTION 3\nc\nSECTION 4\nd\nCan I get my money back for the classes I missed?"
    assert followed(PROBLEMS[1127], poem).strict == (True, True)
    assert followed(PROBLEMS[1127], poem + " Bye").strict == (True, False)
    assert followed(PROBLEMS[1127], poem.replace("SECTION 4\n", "")).strict == (False, True)


def test_verdicts_on_languages_do_not_change() -> None:
    """Languages are guessed at random unless a seed is set."""
    assert len({followed(PROBLEMS[1019], "a b c d e").strict for _ in range(10)}) == 1


def test_a_missing_sentence_model_is_told_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    def absent(name: str) -> Any:
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", absent)
    check_sentence_model(list(PROBLEMS.values()))
    counting = {"instruction_id_list": ["length_constraints:number_sentences"]}
    with pytest.raises(MergeError, match="punkt_tab"):
        check_sentence_model([*PROBLEMS.values(), counting])


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    import nltk
    from lm_eval.tasks.ifeval import instructions_util

    from actmat_experiments.reasoning.marks import _offline

    def download(*_: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(nltk, "download", download)
    with _offline():
        importlib.reload(instructions_util)


def test_threads_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LOCAL_RANK that stayed behind would make later libraries wait for other processes."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    marks._judge.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: followed(PROBLEMS[1001], "no comma").strict[0], range(32)))
    assert "LOCAL_RANK" not in os.environ
