"""The inputs of recipes, each looked at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
class Given:
    """Open inputs of a recipe: its base, if it has one, and its experts in order."""

    base: OpenInput | None
    experts: tuple[OpenInput, ...]

    def paths(self, labels: Sequence[str]) -> dict[str, Path | str]:
        """Name of an input, or of a part of it -> folder, file or URL that it is read from."""
        named = [("base", self.base)] if self.base is not None else []
        named += [(f"expert '{label}'", e) for label, e in zip(labels, self.experts, strict=True)]
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


@dataclass(frozen=True)
class Wanted:
    """Recipes with their inputs.

    Args:
        recipes: as they were given.
        given: inputs of each recipe; fewer if some have problems.
        problems: with inputs that cannot be opened.
    """

    recipes: tuple[Recipe, ...]
    given: tuple[Given, ...]
    problems: Problems


@contextlib.contextmanager
def locate_recipes(recipes: Sequence[Recipe], held: Held | None = None) -> Iterator[Wanted]:
    """The inputs of recipes, each looked at once for all of them; problems are noted."""
    with contextlib.ExitStack() as stack:
        looks = _Looks(stack, held or {})
        given = [looks.given(recipe) for recipe in recipes]
        yield Wanted(tuple(recipes), tuple(g for g in given if g is not None), looks.problems)


@contextlib.contextmanager
def located(recipe: Recipe, held: Held | None = None) -> Iterator[Given]:
    """The inputs of a recipe, for decisions that come before its run.

    Raises:
        CheckpointError: some cannot be opened; carries all problems.
    """
    with locate_recipes([recipe], held) as wanted:
        if wanted.problems.found:
            raise input_error(wanted.problems)
        yield wanted.given[0]


@dataclass
class _Looks:
    """Inputs by place, closed by the stack; and problems with others."""

    stack: contextlib.ExitStack
    held: Held
    problems: Problems = field(default_factory=Problems)
    inputs: dict[tuple[str, tuple[StackWord, ...]], OpenInput | None] = field(default_factory=dict)

    def given(self, recipe: Recipe) -> Given | None:
        """The inputs of a recipe; None if one has a problem."""
        base = self._look(recipe.base) if recipe.base else None
        experts = [self._look(e.path, e.stacks) for e in recipe.experts]
        opened = tuple(e for e in experts if e is not None)
        return None if len(opened) < len(experts) or (recipe.base and base is None) else Given(base, opened)

    def _look(self, place: str, stacks: tuple[StackWord, ...] = ()) -> OpenInput | None:
        if (place, stacks) not in self.inputs:
            self.inputs[place, stacks] = None
            with self.problems.noted(CheckpointError):
                opened = self.held[place]() if place in self.held else locate(place, stacks)
                self.stack.callback(opened.close)
                self.inputs[place, stacks] = opened
        return self.inputs[place, stacks]


def input_error(problems: Problems) -> CheckpointError:
    """One error of all problems with the inputs; those of an input that is named twice stand once."""
    texts = dict.fromkeys(p for e in problems.found for p in (e.problems if len(e.problems) > 1 else [e.sentence]))
    return CheckpointError(f"{plural(len(texts), 'problem')} with the inputs.", texts)
