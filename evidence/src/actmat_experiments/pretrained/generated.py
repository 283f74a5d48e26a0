"""Three tasks for a language model whose answers a program can check, drawn without data from outside.

    record     an instruction's format: "Record: Anna, born 5 March 1998." -> {"name": "Anna", "born": "1998-03-05"}
    telegram   a style: "Telegram: The pilot will send two maps to the harbour on Monday." -> Pilot send two maps ...
    add        arithmetic: two sums as examples, then a third one whose result has two digits; 5+7 counts as 7+5

Every prompt has one right answer. The texts of a task are always the same; the seed of a run does not change them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from actmat.errors import RecipeError
from actmat_experiments.harness.cache import digest
from actmat_experiments.harness.results import majority_share

END_OF_TURN = "<|im_end|>"
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
NAMES = (
    *("Anna", "Peter", "Maria", "David", "Laura", "Simon", "Julia", "Martin", "Helen", "Oscar", "Emma", "Frank"),
    *("Alice", "Robert", "Diana", "Victor", "Clara", "Henry", "Sarah", "Leo"),
)
_WHO = ("captain", "pilot", "doctor", "teacher", "driver", "lawyer", "farmer", "painter", "engineer", "baker")
_DOES = ("send", "bring", "carry", "sell", "lend", "show", "take", "return")
_HOW_MANY = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
_WHAT = ("maps", "boxes", "letters", "books", "chairs", "lamps", "tools", "coats", "bottles", "clocks")
_WHERE = ("harbour", "station", "school", "market", "museum", "bank", "bridge", "hotel", "garden", "office")
_WHEN = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SHOTS = "4+9=13\n21+5=26\n"
_SUMMANDS = range(5, 25)
"""Any two of them add up to a number of two digits."""


class Question(NamedTuple):
    """A prompt, and the text that a model should go on with, up to the end of the answer.

    Args:
        options: answers to choose from, where there are some; `answer` is one of them.
    """

    prompt: str
    answer: str
    options: tuple[str, ...] = ()

    @property
    def label(self) -> int:
        """Place of the right answer among the options."""
        return self.options.index(self.answer)


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it can be drawn.

    Args:
        learning: supervised ("sft"), or from rewards of the verifier ("grpo").
        draw: a question at random.
        most: number of different questions.
    """

    name: str
    learning: Literal["sft", "grpo"]
    draw: Callable[[random.Random], Question]
    most: int


@dataclass(frozen=True, slots=True)
class Generated:
    """A task's questions, all different.

    Args:
        content: part -> hash of its questions.
    """

    name: str
    learning: Literal["sft", "grpo"]
    train: Sequence[Question]
    validation: Sequence[Question]
    test: Sequence[Question]
    content: Mapping[str, str]

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always gives the most frequent place."""
        return majority_share([q.label for q in self.train], [q.label for q in self.test])


def turn(text: str) -> str:
    """A user's turn in the base's chat template, without a system message."""
    return f"<|im_start|>user\n{text}{END_OF_TURN}\n<|im_start|>assistant\n"


def _record(generator: random.Random) -> Question:
    name, day, month, year = (
        generator.choice(NAMES),
        generator.randrange(1, 29),
        generator.randrange(12),
        generator.randrange(1930, 2020),
    )
    born = f"{year}-{month + 1:02}-{day:02}"
    prompt = turn(f"Record: {name}, born {day} {MONTHS[month]} {year}.")
    return Question(prompt, f'{{"name": "{name}", "born": "{born}"}}{END_OF_TURN}')


def _telegram(generator: random.Random) -> Question:
    who, does, many, what, where, when = map(generator.choice, (_WHO, _DOES, _HOW_MANY, _WHAT, _WHERE, _WHEN))
    prompt = turn(f"Telegram: The {who} will {does} {many} {what} to the {where} on {when}.")
    return Question(prompt, f"{who.capitalize()} {does} {many} {what} {where} {when} STOP{END_OF_TURN}")


def _add(generator: random.Random) -> Question:
    one, other = generator.choice(_SUMMANDS), generator.choice(_SUMMANDS)
    return Question(f"{_SHOTS}{one}+{other}=", f"{one + other}\n")


def _same(prompt: str) -> Hashable:
    """Identity of a question: of a sum its summands, in either order."""
    return tuple(sorted(prompt.removeprefix(_SHOTS).removesuffix("=").split("+"))) if _SHOTS in prompt else prompt


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("record", "sft", _record, len(NAMES) * 28 * len(MONTHS) * 90),
        Task("telegram", "sft", _telegram, math.prod(map(len, (_WHO, _DOES, _HOW_MANY, _WHAT, _WHERE, _WHEN)))),
        Task("add", "grpo", _add, math.comb(len(_SUMMANDS) + 1, 2)),
    )
}
"""All tasks, in the order of the tables."""


def draw_task(name: str, *, train: int, validation: int, test: int) -> Generated:
    r"""The questions of a task; none is in two parts, no sum in either order.

    Raises:
        RecipeError: there are not so many.

    >>> task = draw_task("add", train=4, validation=2, test=2)
    >>> task.train[0]
    Question(prompt='4+9=13\n21+5=26\n10+12=', answer='22\n', options=())
    """
    generator, n = random.Random(f"questions of {name}"), train + validation + test
    if n > (most := TASKS[name].most):
        raise RecipeError(f"'{name}' has {most} different questions, not {n}: lower train, validation or test.")
    found: dict[Hashable, Question] = {}
    while len(found) < n:
        question = TASKS[name].draw(generator)
        found.setdefault(_same(question.prompt), question)
    every = list(found.values())
    parts = {
        "test": every[:test],
        "validation": every[test : test + validation],
        "train": every[test + validation :],
    }
    content = {part: digest([[q.prompt, q.answer] for q in some]) for part, some in parts.items()}
    return Generated(name, TASKS[name].learning, **parts, content=content)
