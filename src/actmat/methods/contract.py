"""The contract of a merge method: one pure function and one declaration in facets, `MergeMethod`.

The planner, the engine, the command line, the tables of the documentation and the conformance tests read the
declaration. A method that is a formula needs a name, its function and `acts_on`; the other facets say which faster
forms it has (`LowRankForm`, `Stages`, `combine`), how it reads (`Access`) and its cost (`MethodCost`).

A merge function has the form

    def merge(deltas: Sequence[Tensor], *, <needs>, <options>) -> Merged

* `deltas[t]` is `D_t = W_t - W_0` in the compute dtype. The sequence may read lazily: an item that is requested
  twice may be read twice, so a method declared `one_pass` iterates over it once, with one delta alive at a time.
* Needs are the keyword-only parameters named in `NEEDS`; every other keyword-only parameter is an option. Names,
  defaults, types and bounds of options are read from the signature (`Annotated[float, Bounds(0, 1)]`), and their
  documentation from the annotation (`Annotated[float, "its meaning"]`) or from `Args:` in the docstring. A second
  positional parameter serves the method's own low-rank form (`_shared.per_matrix.in_cores`).
* Its docstring describes the method, for `actmat methods NAME` and the pages: the idea in one sentence, the equation
  (indented), what a user should know, and under `Source:` the publication.
* It reads no files, logs nothing, picks no device, draws no global randomness, mutates no input and never
  falls back to another method.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from actmat.errors import RecipeError, did_you_mean
from actmat.linalg.scaling import FLOAT32_MAX
from actmat.methods.facets import (
    MEAN,
    Access,
    ActsOn,
    Combination,
    Elsewhere,
    Law,
    LowRankForm,
    Merged,
    MethodCost,
    Options,
    Stages,
    Survey,
    holds,
)

NEEDS = ("weights", "base", "statistics", "generator", "survey")
"""Keyword-only parameters that the engine fills in; they are not options.

weights     Sequence[float], one per expert, from the recipe (default: all 1)
base        Tensor, W_0 in the compute dtype, same shape as a delta; see `MergeMethod.uses_base`
statistics  Mapping[str, Sequence[Tensor]]: kind ("gram", "fisher") -> one tensor per expert
generator   torch.Generator on the CPU, seeded from the recipe's seed and the tensor's name
survey      the value of `Survey.finish`, or None when the survey does not apply to these options
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Closed interval of an option's value, `low <= value <= high`; `open_low` excludes the lower end."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def __str__(self) -> str:
        left = "(" if self.open_low else "["
        low = "-inf" if self.low is None else f"{self.low:g}"
        high = "inf" if self.high is None else f"{self.high:g}"
        return f"{left}{low}, {high}]"

    def holds(self, value: float) -> bool:
        """True if `value` lies inside."""
        above = self.low is None or value > self.low or (value == self.low and not self.open_low)
        return above and (self.high is None or value <= self.high)


Weights = Sequence[float] | None
Fraction = Annotated[float, Bounds(0, 1)]
Fractions = Annotated[float | list[float], Bounds(0, 1)]
"""One number for all experts, or a list with one number each."""


@dataclass(frozen=True, slots=True)
class Option:
    """One hyper-parameter of a method, as read from its signature."""

    name: str
    type: Any
    default: Any
    bounds: Bounds | None
    doc: str

    @property
    def type_name(self) -> str:
        """Type in the notation of the documentation: `float | None`, `"a" | "b"`."""
        return _type_name(self.type)

    def problem(self, value: Any) -> str | None:
        """Error message for a `value` that does not fit; None for one that does."""
        if not _fits(value, self.type):
            return f"option '{self.name}' expects {self.type_name}, got {value!r}"
        numbers = [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int | float)]
        for number in numbers:
            if FLOAT32_MAX < abs(number) < math.inf:  # infinity is a limit that some options have
                return f"option '{self.name}' must be at most {FLOAT32_MAX:g} in magnitude, got {str(number)[:40]}"
        if self.bounds and (outside := [n for n in numbers if not self.bounds.holds(n)]):
            return f"option '{self.name}' must lie in {self.bounds}, got {outside if numbers[1:] else outside[0]!r}"
        if value != self.default and not all(map(math.isfinite, numbers)):
            return f"option '{self.name}' must be finite, got {value!r}"
        return None


@dataclass(frozen=True, slots=True)
class Description:
    """Description of a method.

    Args:
        summary: the idea in one sentence.
        equation: the merged delta, in lines of plain text.
        notes: what a user should know, in Markdown.
        source: the publication.
    """

    summary: str = ""
    equation: str = ""
    notes: str = ""
    source: str = ""


def parse_description(doc: str) -> Description:
    """The parts of a method's docstring; its sections other than `Source:` and its examples are left out."""
    summary, *blocks = inspect.cleandoc(doc).split("\n\n")
    equation = source = ""
    notes: list[str] = []
    for block in blocks:
        first, _, rest = block.partition("\n")
        if first == "Source:":
            source = " ".join(line.strip() for line in rest.splitlines())
        elif block.startswith("    ") and not equation and not notes:
            equation = inspect.cleandoc(block)
        elif not first.startswith((">>>", " ")) and not _SECTION.fullmatch(first):
            notes.append(block if block.startswith("|") else " ".join(block.split()))
    return Description(" ".join(summary.split()), equation, "\n\n".join(notes), source)


_SECTION = re.compile(r"(Args|Raises|Returns):")


@dataclass(frozen=True, repr=False)
class MergeMethod:
    """Declaration of one merge method.

    Args:
        name: in recipes and on the command line.
        merge: of dense deltas.
        laws: properties that hold for any input (default options, float64); the conformance tests check each.
        declared_by: function whose keyword-only parameters are the options and whose docstring describes the method,
            where `merge` takes `**given`; default: `merge`.
        takes: the members of `NEEDS` that such a `merge` takes.
        needs_statistics: kinds without which it cannot merge.
        max_experts: for which the method is defined; None: any number.
        elsewhere: `(options, n_experts) -> Elsewhere`, by which tensors are merged that the method does not act on, so
            that a weight means the same on every tensor.
        combine: `(gram, *, <weights>, <options>) -> Combination`, where the result is a sum over `D_1 .. D_T` (with
            `W_0` before them, if it takes the base) whose coefficients depend only on their inner products `gram`; or
            None. Where the method streams, the engine then adds up and writes chunk by chunk and holds no whole delta.
        preset_of: the method of which this is a preset.
        note: a fact that every plan with this method states.
        weights_problem: `(options, weights) -> reason`, without a full stop, for which `merge` refuses the weights, or
            None.

    Raises:
        TypeError: an unknown law or kind, or a merge function whose options cannot be read from its signature.
    """

    name: str
    merge: Callable[..., Merged]
    acts_on: ActsOn
    laws: frozenset[Law] = frozenset()
    declared_by: Callable[..., Any] | None = None
    takes: tuple[str, ...] = ()
    lowrank: LowRankForm | None = None
    access: Access = field(default_factory=Access)
    cost: MethodCost = field(default_factory=MethodCost)
    needs_statistics: tuple[str, ...] = ()
    max_experts: int | None = None
    stages: Stages | None = None
    survey: Survey | None = None
    elsewhere: Callable[[Mapping[str, Any], int], Elsewhere] = MEAN
    combine: Callable[..., Combination] | None = None
    preset_of: str | None = None
    note: str = ""
    weights_problem: Callable[[Options, Sequence[float]], str | None] | None = None

    def __post_init__(self) -> None:
        for name, values, kind in (("acts_on", [self.acts_on], ActsOn), ("laws", self.laws, Law)):
            if wrong := [v for v in values if v not in typing.get_args(kind)]:
                known = ", ".join(map(repr, typing.get_args(kind)))
                raise TypeError(f"MergeMethod {self.name!r}: '{name}' expects {known}, got {wrong[0]!r}")
        _ = self.needs, self.options

    def __repr__(self) -> str:
        return f"<MergeMethod {self.name}: {self.text.summary}>"

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Options by name, in the order of the signature."""
        return read_options(self.name, self.declared_by or self.merge)

    @cached_property
    def text(self) -> Description:
        """Description of the method, from its docstring."""
        return parse_description((self.declared_by or self.merge).__doc__ or "")

    @cached_property
    def needs(self) -> frozenset[str]:
        """The members of `NEEDS` that the method takes."""
        if self.declared_by is not None:
            return frozenset(self.takes)
        parameters = inspect.signature(self.merge).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise TypeError(f"{self.name}: a merge function takes no **kwargs; a misspelled option must be an error")
        return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in NEEDS)

    @property
    def needs_base(self) -> bool:
        """True if the method reads the base weights, under some options at least."""
        return "base" in self.needs

    @property
    def is_random(self) -> bool:
        """True if the method draws random numbers (from the given generator)."""
        return "generator" in self.needs

    @property
    def is_weighted(self) -> bool:
        """True if experts may have weights."""
        return "weights" in self.needs

    def uses_base(self, options: Mapping[str, Any]) -> bool:
        """True if a call with these options reads the base and so must be given it."""
        return self.needs_base and holds(self.access.base, options)

    def moves_base(self, options: Mapping[str, Any]) -> bool:
        """True if a call with these options may change the base although all deltas are zero."""
        return holds(self.access.moves_base, options)

    def is_baseless(self, options: Mapping[str, Any], n_experts: int) -> bool:
        """True if the merged weights do not depend on the base, so that none is needed."""
        return holds(self.access.baseless, options, n_experts)

    def streams(self, options: Mapping[str, Any]) -> bool:
        """True if a call with these options reads the deltas chunk by chunk and holds none."""
        return holds(self.access.streams, options)

    @property
    def keeps_row_space(self) -> bool:
        """True if merges of several row blocks of one tensor share their rows; see `LowRankForm`."""
        return self.lowrank is None or self.lowrank.keeps_row_space

    def meets_all(self, options: Mapping[str, Any]) -> bool:
        """True if weights have no effect on experts whose row spaces are linearly independent."""
        return self.lowrank is not None and holds(self.lowrank.meets_all, options)

    def why_dense(
        self, options: Mapping[str, Any], n_experts: int, weights: Sequence[float] | None = None
    ) -> str | None:
        """The reason why low-rank deltas cannot be merged in factored form, or None."""
        if self.lowrank is None:
            kind = "acts on single entries" if self.acts_on != "matrix" else "has no low-rank form"
            return f"{self.name} {kind}"
        return None if self.lowrank.why_not is None else self.lowrank.why_not(options, n_experts, weights)

    def resolve_options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid with `given`.

        Raises:
            RecipeError: unknown options or values that do not fit; carries all problems.
        """
        return overlay_options(f"method '{self.name}'", self.options, chosen)


def read_options(name: str, function: Callable[..., Any]) -> dict[str, Option]:
    """Options of `function`: its keyword-only parameters other than `NEEDS`; `name` is for errors."""
    docs = _argument_docs(function.__doc__ or "")
    out: dict[str, Option] = {}
    for key, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY or key in NEEDS:
            continue
        if parameter.default is parameter.empty:
            raise TypeError(f"{name}: option '{key}' has no default")
        kind: Any = Any if parameter.annotation is parameter.empty else parameter.annotation
        kind, *notes = typing.get_args(kind) if typing.get_origin(kind) is Annotated else [kind]
        bounds = next((n for n in notes if isinstance(n, Bounds)), None)
        doc = next((n for n in notes if isinstance(n, str)), docs.get(key, ""))
        out[key] = Option(key, kind, parameter.default, bounds, doc)
    return out


def overlay_options(what: str, options: Mapping[str, Option], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of `options` overlaid with `given`; `what` has them, such as "method 'ties'".

    Raises:
        RecipeError: unknown options or values that do not fit; carries all problems.
    """
    problems = []
    for name, value in chosen.items():
        option = options.get(name)
        if option is None:
            known = ", ".join(options) or "none"
            hint = did_you_mean(name, options) + ELSEWHERE.get(name, "")
            problems.append(f"{what} has no option '{name}'.{hint} Its options: {known}")
        elif (problem := option.problem(value)) is not None:
            problems.append(f"{what}: {problem}")
    if problems:
        raise RecipeError("The options do not fit the method.", problems)
    return {name: chosen.get(name, o.default) for name, o in options.items()}


_NORMALIZE = (
    " The weights of the experts are divided by their sum with --set normalize=true (normalize: true in a recipe); the "
    "merged delta is made smaller with --scale."
)
ELSEWHERE: Mapping[str, str] = {"normalize": _NORMALIZE, "normalise": _NORMALIZE}
"""Options that no method has, and the recipe fields that do the same for every method."""


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # imported late: listing methods does not need it

    return TypeAdapter(kind, config={"strict": True, "arbitrary_types_allowed": True})


def _fits(value: Any, kind: Any) -> bool:
    """True if the value is of this type; a number may be an int for a float, and a tuple may stand for a list."""
    from pydantic import ValidationError

    for form in (list(value), tuple(value)) if isinstance(value, list | tuple) else (value,):
        with contextlib.suppress(ValidationError):
            _adapter(kind).validate_python(form)
            return True
    return False


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(k) for k in typing.get_args(kind))
    if origin is Literal:
        return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in typing.get_args(kind))
    if kind is type(None):
        return "None"
    return getattr(kind, "__name__", str(kind))


def _argument_docs(doc: str) -> dict[str, str]:
    """`Args:` section of a docstring as name -> text."""
    out: dict[str, str] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(doc).splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside and line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(":")
            out[name] = text.strip()
        elif inside and line.strip() and name:
            out[name] += " " + line.strip()
    return out
