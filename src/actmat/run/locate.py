"""The inputs of recipes, each looked at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import CheckpointError, Problems
from actmat.experts.locate import OpenInput, fields_of, has_factors, locate, read_paths
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import StackWord
from actmat.recipe import Recipe
from actmat.report.words import plural

Held = Mapping[str, Callable[[], OpenInput]]
"""Inputs in memory, see `RunSettings.held`."""


@dataclass(frozen=True)
class Located:
    """A recipe with its open inputs: its base, if it has one, and its experts in order."""

    recipe: Recipe
    base: OpenInput | None
    experts: tuple[OpenInput, ...]

    @property
    def paths(self) -> dict[str, Path | str]:
        """Name of an input, or of a part of it -> folder, file or URL that it is read from."""
        named = [("base", self.base)] if self.base is not None else []
        named += [(f"expert '{label}'", e) for label, e in zip(self.recipe.labels, self.experts, strict=True)]
        paths: dict[str, Path | str] = {}
        for name, located in named:
            rows = read_paths(located).items()
            paths |= {name if text == located.location else f"{name}: {text}": path for text, path in rows}
        return paths

    @property
    def only_adapters(self) -> bool:
        """True if all experts are adapters."""
        return bool(self.experts) and all(isinstance(e, Adapter) for e in self.experts)

    @property
    def have_factors(self) -> bool:
        """True if all experts are adapters that can be merged without a base."""
        return all(map(has_factors, self.experts))

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields that tell the architecture: those of the base, else of the first expert."""
        return fields_of(self.experts[0] if self.base is None else self.base)


@contextlib.contextmanager
def locate_recipes(recipes: Sequence[Recipe], held: Held, problems: Problems) -> Iterator[list[Located]]:
    """The inputs of each recipe, looked at once for all; those that cannot be opened are left out, with a problem."""
    named = [(r, (r.base, ()), [(e.path, e.stacks) for e in r.experts]) for r in recipes]
    opened: dict[tuple[str, tuple[StackWord, ...]], OpenInput] = {}
    with contextlib.ExitStack() as stack:
        for place, words in dict.fromkeys(k for _, b, experts in named for k in ((b, *experts) if b[0] else experts)):
            with problems.noted(CheckpointError):
                located = held[place]() if place in held else locate(place, words)
                stack.callback(located.close)
                opened[place, words] = located
        yield [Located(r, opened.get(base), tuple(opened[e] for e in es if e in opened)) for r, base, es in named]


@contextlib.contextmanager
def locate_inputs(recipe: Recipe, held: Held | None = None) -> Iterator[Located]:
    """The inputs of a recipe, for decisions that come before its run.

    Raises:
        CheckpointError: some cannot be opened; carries all problems.
    """
    problems = Problems()
    with locate_recipes([recipe], held or {}, problems) as located:
        if problems.found:
            raise input_error(problems)
        yield located[0]


def input_error(problems: Problems) -> CheckpointError:
    """One error of all problems with the inputs; those of an input that is named twice stand once."""
    texts = dict.fromkeys(p for e in problems.found for p in (e.problems if len(e.problems) > 1 else [e.sentence]))
    return CheckpointError(f"{plural(len(texts), 'problem')} with the inputs.", texts)
