"""The search space: methods with options, scales, and factors for groups of layers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actmat.errors import RecipeError
from actmat.methods import all_methods, get_method
from actmat.methods.spaces import Space as MergeSpace
from actmat.recipe.text import UnreadableError, parse_yaml

DEFAULT_METHODS = (
    *("average", "ties", "tsv", "iso_c", "knots", "cart", "dc_merge", "actmat", "actmat_ridge", "swudi", "aswudi"),
    "regmean",
)
"""Methods that came first or second in some suite of docs/tune-results.md, and the average."""

ADAPTER_METHODS = ("average", "tsv", "cart", "dc_merge", "aswudi", "dc_merge@pico", "regmean")
"""In place of them where all experts are adapters: those that merge factors and were near the best on adapters."""

SCALES = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class MergeChoice:
    """A merge at scale 1: a method with options, weights of the experts, and a space; None: the recipe's."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None
    space: MergeSpace | None = None

    @property
    def key(self) -> str:
        """The same text for the same choice."""
        return json.dumps(asdict(self), sort_keys=True, default=list)

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        weights = "" if self.weights is None else " w=" + "/".join(f"{w:.3g}" for w in self.weights)
        space = f"@{self.space}" if self.space else ""
        return self.method + space + (f"[{options}]" if options else "") + weights


@dataclass(frozen=True)
class TuneCandidate:
    """One merge: `W* = W_0 + scale * factor_g * D*` in every layer of group `g`."""

    merge: MergeChoice
    scale: float
    groups: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same text for the same candidate."""
        return json.dumps([self.merge.key, self.scale, dict(self.groups)], sort_keys=True)

    def factor(self, group: str) -> float:
        """Factor of the merged delta in a group of layers."""
        return self.scale * self.groups.get(group, 1.0)

    def __str__(self) -> str:
        groups = " ".join(f"{g}:{v:.3g}" for g, v in self.groups.items())
        return f"{self.merge} x {self.scale:.3g}" + (f" ({groups})" if groups else "")


class MethodChoice(BaseModel):
    """A method, values to try of its options, and the space in which it works (docs/spaces); None: the recipe's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: str
    options: dict[str, list[Any]] = Field(default_factory=dict)
    space: MergeSpace | None = None

    def choices(self) -> Iterator[MergeChoice]:
        """One for each combination of option values."""
        for values in itertools.product(*self.options.values()):
            yield MergeChoice(self.method, dict(zip(self.options, values, strict=True)), space=self.space)


def _method(text: str) -> dict[str, str]:
    """`NAME` or `NAME@SPACE`."""
    name, _, space = text.partition("@")
    return {"method": name, "space": space} if space else {"method": name}


def _usual(names: Sequence[str]) -> tuple[MethodChoice, ...]:
    return tuple(MethodChoice.model_validate(_method(name)) for name in names)


class SearchSpace(BaseModel):
    """All that is tried.

    >>> space = make_space({"methods": ["average", {"method": "ties", "options": {"density": [0.1, 0.3]}}]})
    >>> [str(c) for c in space.merges()]
    ['average', 'ties[density=0.1]', 'ties[density=0.3]']
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    methods: tuple[MethodChoice, ...] = Field(default=_usual(DEFAULT_METHODS), min_length=1)
    scales: tuple[Annotated[float, Field(gt=0, le=100)], ...] = Field(default=SCALES, min_length=1)
    groups: Literal["none", "kind", "depth", "kind-depth"] = "none"
    weights: bool = False

    def merges(self) -> list[MergeChoice]:
        """Every merge of the first stage."""
        return [choice for method in self.methods for choice in method.choices()]

    def fitted(self, *, to_adapters: bool) -> SearchSpace:
        """The same with methods that suit the experts, unless methods were given."""
        if "methods" in self.model_fields_set:
            return self
        return self.model_copy(update={"methods": _usual(ADAPTER_METHODS if to_adapters else DEFAULT_METHODS)})

    @property
    def statistics(self) -> frozenset[str]:
        """Kinds of statistics that the methods need."""
        return frozenset(kind for m in self.methods for kind in get_method(m.method).needs_statistics)


def make_space(fields: Mapping[str, Any]) -> SearchSpace:
    """A space from plain data; a method may be given by its name only, or as `NAME@SPACE`.

    >>> [str(c) for c in make_space({"methods": ["cart", "cart@pico"]}).merges()]
    ['cart', 'cart@pico']

    Raises:
        RecipeError: every problem: an unknown field, method or option, a scale that is not positive.
    """
    given = dict(fields)
    if "methods" in given:
        wanted = given["methods"]
        wanted = [m.name for m in all_methods()] if wanted in ("all", ["all"], ("all",)) else wanted
        given["methods"] = [_method(m) if isinstance(m, str) else m for m in wanted]
    try:
        space = SearchSpace.model_validate(given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise RecipeError("The search space is not valid.", problems) from None
    problems = []
    for choice in space.merges():
        try:
            get_method(choice.method).resolve_options(choice.options)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError("The search space is not valid.", dict.fromkeys(problems))
    return space


def load_space(path: str | Path) -> SearchSpace:
    """The space of a YAML file.

    Raises:
        RecipeError: it cannot be read, or is not valid.
    """
    try:
        _, data = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        raise RecipeError(f"{path}: the search space cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise RecipeError(f"{path}: expected a mapping with 'methods', found {type(data).__name__}")
    return make_space(data)
