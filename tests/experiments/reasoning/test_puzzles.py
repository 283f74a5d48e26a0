"""The tasks of the small suite: verifiers agree with naive ones, spoilt answers are wrong, parts are disjoint."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from actmat_experiments.reasoning.small.model import LONGEST, new_tokenizer
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Puzzle, split, unreliable
from actmat_experiments.reasoning.small.train import LONGEST_ANSWER

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
