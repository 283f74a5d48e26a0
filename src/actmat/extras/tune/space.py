"""The candidates of a search: methods with options, at several scales."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from actmat.errors import RecipeError
from actmat.methods import all_methods, get_method
from actmat.methods.spaces import Space as MergeSpace

DEFAULT_METHODS = ("regmean", "average", "actmat_ridge", "tsv", "dc_merge")
"""In the measurements of docs/tune-results.md, the choice among these was as good as among twelve."""
ADAPTER_METHODS = ("regmean", "average", "tsv")
"""In place of them where all experts are adapters: better than the choice among eight there."""
PRIOR = 4.0
"""Inputs that the prior of `regmean` counts as, see docs/inputs.md."""
RIDGE = 0.001
"""Of `regmean`, where it has the prior."""
SCALES = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class MergeChoice:
    """A merge at scale 1: a method with options, and a space; None: the recipe's."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    space: MergeSpace | None = None

    @property
    def key(self) -> str:
        """The same text for the same choice."""
        return json.dumps(asdict(self), sort_keys=True, default=list)

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        space = f"@{self.space}" if self.space else ""
        return self.method + space + (f"[{options}]" if options else "")


@dataclass(frozen=True)
class TuneCandidate:
    """One merge: `W* = W_0 + scale * D*`."""

    merge: MergeChoice
    scale: float

    @property
    def key(self) -> str:
        """The same text for the same candidate."""
        return json.dumps([self.merge.key, self.scale])

    def __str__(self) -> str:
        return f"{self.merge} x {self.scale:.3g}"


@dataclass(frozen=True)
class SearchSpace:
    """All that is tried.

    Args:
        merges: at scale 1; empty: those that suit the experts.
        scales: at which each may be tried.

    >>> space = make_space({"methods": ["average", {"method": "ties", "options": {"density": [0.1, 0.3]}}]})
    >>> [str(c) for c in space.merges]
    ['average', 'ties[density=0.1]', 'ties[density=0.3]']
    """

    merges: tuple[MergeChoice, ...] = ()
    scales: tuple[float, ...] = SCALES

    def fitted(self, measured: int, *, to_adapters: bool) -> SearchSpace:
        """The same with methods that suit the experts, unless methods were given; `measured`: inputs of an expert."""
        names = ADAPTER_METHODS if to_adapters else DEFAULT_METHODS
        usual = (MergeChoice(n, prior_of(measured) if n == "regmean" else {}) for n in names)
        return self if self.merges else SearchSpace(tuple(usual), self.scales)

    @property
    def statistics(self) -> frozenset[str]:
        """Kinds of statistics that the methods need."""
        return frozenset(kind for m in self.merges for kind in get_method(m.method).needs_statistics)


def prior_of(measured: int) -> dict[str, float]:
    """Options of `regmean` for statistics of so many inputs of an expert.

    >>> prior_of(8)
    {'prior': 0.5, 'ridge': 0.001}
    """
    return {"prior": round(PRIOR / max(1, measured), 4), "ridge": RIDGE}


def make_space(fields: Mapping[str, Any]) -> SearchSpace:
    """A space from plain data; a method may be given by its name only, or as `NAME@SPACE`.

    >>> [str(c) for c in make_space({"methods": ["cart", "cart@pico"]}).merges]
    ['cart', 'cart@pico']

    Raises:
        RecipeError: every problem: an unknown field, method or option, a scale that is not positive.
    """
    wanted = fields.get("methods", ())
    names = [m.name for m in all_methods()] if wanted in ("all", ["all"], ("all",)) else wanted
    problems = [f"unknown field '{n}'; expected methods or scales" for n in fields.keys() - {"methods", "scales"}]
    scales = fields.get("scales", SCALES)
    if not scales or not all(_is_number(s) and 0 < float(s) <= 100 for s in scales):
        problems.append(f"scales: expected numbers above 0 and up to 100, found {list(scales)}")
    merges = []
    for name in names:
        try:
            for choice in _choices(name):
                get_method(choice.method).resolve_options(choice.options)
                merges.append(choice)
        except RecipeError as error:
            problems += error.problems or [str(error)]
    if "methods" in fields and not names:
        problems.append("methods: expected at least one")
    if problems:
        raise RecipeError("The search space is not valid.", dict.fromkeys(problems))
    return SearchSpace(tuple(merges), tuple(map(float, scales)))


def _is_number(value: Any) -> bool:
    try:
        return float(value) == float(value)
    except (TypeError, ValueError):
        return False


def _choices(entry: str | Mapping[str, Any]) -> Iterator[MergeChoice]:
    """One for each combination of option values."""
    if isinstance(entry, str):
        name, _, space_name = entry.partition("@")
        entry = {"method": name, "space": space_name or None}
    space: Any = entry.get("space")
    options = dict(entry.get("options", {}))
    if entry.keys() - {"method", "options", "space"} or not isinstance(entry.get("method"), str):
        raise RecipeError(f"a method is a name, or a mapping with method, options and space; found {dict(entry)}")
    if space is not None and space not in get_args(MergeSpace):
        raise RecipeError(f"{entry['method']}: unknown space '{space}'; expected {', '.join(get_args(MergeSpace))}")
    for values in itertools.product(*options.values()):
        yield MergeChoice(entry["method"], dict(zip(options, values, strict=True)), space)


def scale_space(recipe: Any, scales: Sequence[float] | None = None) -> SearchSpace:
    """The method of a recipe at several scales.

    >>> from actmat.recipe import Recipe
    >>> space = scale_space(Recipe(experts=("a", "b"), method="ties", options={"density": 0.3}), [0.5, 1.0])
    >>> [str(c) for c in space.merges], space.scales
    (['ties[density=0.3]'], (0.5, 1.0))
    """
    return SearchSpace((MergeChoice(recipe.method, recipe.options),), tuple(scales or SCALES))
