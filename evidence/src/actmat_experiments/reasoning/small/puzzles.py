"""Three verifiable tasks in short text, one per expert of the paper's experiment.

    add 47+38=85             arithmetic: one right answer              (mathematics)
    sort 83172=12378         a procedure on its input                  (code)
    form 6 b2 k=kbacbd       6 letters, exactly 2 b, the first a k:    (instruction following)
                             a great many right answers

An answer is right or wrong, and a few lines of code can tell: that is all that reinforcement learning with verifiable
rewards needs. The base reads text in which only some answers are right (`unreliable`), as a language model does: it
then knows how to answer, but not to prefer right answers, for which the experts are rewarded.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LETTERS = "abcdefghjk"
_FORM = re.compile(r"form (\d) ([a-z])(\d) ([a-z])=")


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A task: prompts, a right answer to each, a wrong one, and the verifier.

    Args:
        question: one line for readers.
        prompts: every prompt there is, in a fixed order.
        answer: a right answer, drawn at random where there are several.
        spoil: a wrong answer near a right one.
        right: whether an answer is right; the verifiable reward.
    """

    name: str
    question: str
    prompts: Callable[[], list[str]]
    answer: Callable[[str, random.Random], str]
    spoil: Callable[[str, str, random.Random], str]
    right: Callable[[str, str], bool]


def _replaced(text: str, place: int, letter: str) -> str:
    return text[:place] + letter + text[place + 1 :]


def _add_prompts() -> list[str]:
    return [f"add {a}+{b}=" for a, b in itertools.product(range(10, 100), repeat=2)]


def _add_answer(prompt: str, generator: random.Random | None = None) -> str:
    a, b = prompt.removeprefix("add ").removesuffix("=").split("+")
    return str(int(a) + int(b))


def _add_spoil(prompt: str, answer: str, generator: random.Random) -> str:
    place = generator.randrange(len(answer))
    return _replaced(answer, place, str((int(answer[place]) + 1 + generator.randrange(9)) % 10))


def _sort_prompts() -> list[str]:
    return [f"sort {''.join(digits)}=" for digits in itertools.permutations("0123456789", 5)]


def _sort_answer(prompt: str, generator: random.Random | None = None) -> str:
    return "".join(sorted(prompt.removeprefix("sort ").removesuffix("=")))


def _sort_spoil(prompt: str, answer: str, generator: random.Random) -> str:
    place = generator.randrange(len(answer) - 1)
    return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]


def _form_prompts() -> list[str]:
    return [
        f"form {length} {wanted}{count} {first}="
        for length in range(4, 9)
        for count in range(1, 4)
        for wanted, first in itertools.permutations(LETTERS, 2)
    ]


def _form_parts(prompt: str) -> tuple[int, str, int, str]:
    found = _FORM.fullmatch(prompt)
    if found is None:
        raise ValueError(f"'{prompt}' is no prompt of the task 'form'")
    length, wanted, count, first = found.groups()
    return int(length), wanted, int(count), first


def _form_answer(prompt: str, generator: random.Random) -> str:
    length, wanted, count, first = _form_parts(prompt)
    others = LETTERS.replace(wanted, "")
    places = generator.sample(range(1, length), count)
    rest = [wanted if i in places else generator.choice(others) for i in range(1, length)]
    return first + "".join(rest)


def _form_spoil(prompt: str, answer: str, generator: random.Random) -> str:
    _, wanted, _, first = _form_parts(prompt)
    others = LETTERS.replace(wanted, "").replace(first, "")
    other = generator.choice(others)
    kind = generator.randrange(3)
    if kind == 0:
        return other + answer[1:]
    if kind == 1:
        return answer + other
    return _replaced(answer, answer.index(wanted), other)


def _form_right(prompt: str, answer: str) -> bool:
    length, wanted, count, first = _form_parts(prompt)
    letters = set(answer) <= set(LETTERS)
    return letters and len(answer) == length and answer.startswith(first) and answer.count(wanted) == count


PUZZLES: tuple[Puzzle, ...] = (
    Puzzle(
        "add",
        "add two numbers of two digits",
        _add_prompts,
        _add_answer,
        _add_spoil,
        lambda prompt, answer: answer == _add_answer(prompt),
    ),
    Puzzle(
        "sort",
        "sort five digits",
        _sort_prompts,
        _sort_answer,
        _sort_spoil,
        lambda prompt, answer: answer == _sort_answer(prompt),
    ),
    Puzzle(
        "form",
        "write letters: so many, so many of one kind, with a given first",
        _form_prompts,
        _form_answer,
        _form_spoil,
        _form_right,
    ),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Disjoint prompts: to train on, to choose settings, to report."""

    train: Sequence[str]
    validation: Sequence[str]
    test: Sequence[str]


@functools.cache
def split(puzzle: Puzzle, n_validation: int, n_test: int, seed: int) -> Parts:
    """The prompts of a task in an order drawn from the seed: test, validation, and the rest to train on."""
    prompts = puzzle.prompts()
    random.Random(f"{seed}/split {puzzle.name}").shuffle(prompts)
    return Parts(prompts[n_test + n_validation :], prompts[n_test : n_test + n_validation], prompts[:n_test])


def unreliable(puzzle: Puzzle, prompt: str, reliability: float, generator: random.Random) -> str:
    """An answer that is right with probability `reliability`, and near a right one otherwise."""
    answer = puzzle.answer(prompt, generator)
    if generator.random() < reliability:
        return answer
    return puzzle.spoil(prompt, answer, generator)
