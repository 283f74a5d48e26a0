"""The inputs of recipes, each looked at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actmat.errors import CheckpointError
from actmat.experts.locate import Located, locate
from actmat.experts.lora.fields import StackWord
from actmat.recipe import Recipe
from actmat.report.words import plural


@dataclass(frozen=True)
class Given:
    """What a recipe names, open: its base, if it has one, and its experts in order."""

    base: Located | None
    experts: tuple[Located, ...]

    @property
    def only_adapters(self) -> bool:
        """True if all experts are adapters."""
        return bool(self.experts) and all(e.needs_base for e in self.experts)

    @property
    def have_factors(self) -> bool:
        """True if all experts are adapters that can be merged without a base."""
        return all(e.has_factors for e in self.experts)

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields that tell the architecture: those of the base, else of the first expert."""
        return self.base.config if self.base is not None else self.experts[0].config


@dataclass
class Looks:
    """Looks at the inputs of recipes.

    Args:
        stack: closes the inputs.
        problems: with those that could not be opened.
    """

    stack: contextlib.ExitStack
    problems: list[str] = field(default_factory=list)
    _found: dict[tuple[str, tuple[StackWord, ...]], Located | None] = field(default_factory=dict)

    def given(self, recipe: Recipe) -> Given | None:
        """The inputs of a recipe; None where one has a problem."""
        base = self._look(recipe.base) if recipe.base else None
        experts = [self._look(e.path, e.stacks) for e in recipe.experts]
        found = tuple(e for e in experts if e is not None)
        return None if len(found) < len(experts) or (recipe.base and base is None) else Given(base, found)

    def _look(self, place: str, stacks: tuple[StackWord, ...] = ()) -> Located | None:
        if (place, stacks) not in self._found:
            self._found[place, stacks] = None
            with noted(self.problems):
                self._found[place, stacks] = self.stack.enter_context(locate(place, stacks))
        return self._found[place, stacks]


@contextlib.contextmanager
def located(recipe: Recipe) -> Iterator[Given]:
    """The inputs of a recipe, for decisions that come before its run.

    Raises:
        CheckpointError: some cannot be opened; carries all problems.
    """
    with contextlib.ExitStack() as stack:
        looks = Looks(stack)
        given = looks.given(recipe)
        if given is None:
            raise input_error(looks.problems)
        yield given


@contextlib.contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Note the problems with an input, and go on."""
    try:
        yield
    except CheckpointError as error:
        problems += error.problems if len(error.problems) > 1 else [error.sentence]


def input_error(problems: list[str]) -> CheckpointError:
    """One error of all problems with the inputs; those of an input that is named twice stand once."""
    found = dict.fromkeys(problems)
    return CheckpointError(f"{plural(len(found), 'problem')} with the inputs.", found)
