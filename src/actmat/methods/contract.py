"""The contract between a merge rule and everything around it.

A rule is one pure function plus one declaration (`MergeMethod`). The engine, the command line, the docs table and
the conformance tests read the declaration; nobody keeps a second list of what a method needs.

A merge function has the form

    def merge(deltas: Sequence[Tensor], *, <needs>, <options>) -> Merged

* `deltas[t]` is `D_t = W_t - W_0` in the compute dtype. The sequence may read lazily: an item that is asked for
  twice may be read twice, so a rule declared `one_pass` walks over it exactly once, with one delta alive at a time.
* Needs are the keyword-only parameters named in `NEEDS`; every other keyword-only parameter is an option. Names,
  defaults, types and bounds of options are read from the signature (`Annotated[float, Bounds(0, 1)]`).
* It reads no files, logs nothing, picks no device, draws no global randomness, mutates no input and never
  falls back to another rule.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from actmat.errors import RecipeError, did_you_mean
from actmat.linalg.lowrank import LowRank

__all__ = [
    "NEEDS",
    "ActsOn",
    "Bounds",
    "Combination",
    "Law",
    "MergeMethod",
    "Merged",
    "MergedLowRank",
    "Option",
    "Stages",
    "Survey",
]

NEEDS = ("weights", "base", "statistics", "generator", "survey")
"""Keyword-only parameters that the engine fills in; they are not options.

weights     Sequence[float], one per expert, from the recipe (default: all 1)
base        Tensor, W_0 in the compute dtype, same shape as a delta; see `MergeMethod.uses_base`
statistics  Mapping[str, Sequence[Tensor]]: kind ("gram", "fisher") -> one tensor per expert
generator   torch.Generator on the CPU, seeded from the recipe's seed and the tensor's name
survey      what `Survey.finish` returned, or None when the survey does not apply to these options
"""

ActsOn = Literal["matrix", "tensor", "elementwise"]
"""matrix: `*batch O I`, a logical linear map; tensor: a whole tensor of any shape; elementwise: every entry of the
result depends on the same entry of the inputs alone, so that the engine may feed flat pieces of any size."""

Law = Literal[
    "permutation",  # f(D_p(1), ..., D_p(T)) = f(D_1, ..., D_T)
    "single",  # f(D) = D
    "identical",  # f(D, ..., D) = D
    "homogeneous",  # f(a D) = a f(D), a > 0
    "odd",  # f(-D) = -f(D)
    "left_orthogonal",  # f(Q D) = Q f(D)
    "right_orthogonal",  # f(D Q) = f(D) Q
    "orthogonal_rows_sum",  # mutually orthogonal row spaces -> sum of the deltas
    "zero_expert",  # an expert with a zero delta leaves the result as it is without that expert
    "zeros",  # all deltas zero -> exactly zero
]


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
        """Whether `value` lies inside."""
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        return self.high is None or value <= self.high


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged delta and what is worth recording about it (rank kept, cut-off, residual, ...)."""

    value: Tensor
    stats: Mapping[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MergedLowRank:
    """A merged delta in factored form, and the same stats that the dense rule would give."""

    value: LowRank
    stats: Mapping[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Combination:
    """A merged delta as a sum: coefficients of the tensors of its basis, and what the rule tells of the call."""

    coefficients: Sequence[float]
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stages:
    """A rule in two halves, `merge = finish(prepare(deltas, **opts), **opts)`, so that variants share the first.

    `key(options)` names what `prepare` depends on: variants with equal keys are served by one `prepare`.
    `finish` must not change the state. Both take all options of the rule.
    """

    key: Callable[[Mapping[str, Any]], Hashable]
    prepare: Callable[..., Any]
    finish: Callable[..., Merged]


@dataclass(frozen=True, slots=True)
class Survey:
    """A pass over all tensors of a merge before the first is merged (thresholds over the whole model).

    `applies(options)` tells whether these options want it. `start(n_experts, options)` makes the state;
    `observe(state, deltas, options)` adds one tensor and must be commutative (integer counts), so that order and
    threads do not matter; `advance(state)` ends a round and returns True when another round is wanted;
    `finish(state)` gives what every merge call then receives as `survey=`.
    """

    applies: Callable[[Mapping[str, Any]], bool]
    start: Callable[[int, Mapping[str, Any]], Any]
    observe: Callable[[Any, Sequence[Tensor], Mapping[str, Any]], None]
    advance: Callable[[Any], bool]
    finish: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One hyper-parameter of a rule, as read from its signature."""

    name: str
    type: Any
    default: Any
    bounds: Bounds | None
    doc: str

    @property
    def type_name(self) -> str:
        """Type as a reader writes it: `float | None`, `"a" | "b"`."""
        return _type_name(self.type)

    def problem(self, value: Any) -> str | None:
        """Why `value` does not fit, or None when it does."""
        if not _fits(value, self.type):
            return f"option '{self.name}' expects {self.type_name}, got {value!r}"
        if self.bounds and isinstance(value, int | float) and not self.bounds.holds(value):
            return f"option '{self.name}' must lie in {self.bounds}, got {value!r}"
        return None


@dataclass(frozen=True)
class MergeMethod:
    """Declaration of one merge rule.

    Args:
        name: what recipes and the command line call it.
        merge: the rule on dense deltas.
        acts_on: what one call must see, see `ActsOn`.
        summary: the idea in one sentence.
        equation: the rule, in plain text.
        reference: citation.
        laws: what holds for any input (with default options, float64); the conformance tests check each.
        merge_lowrank: the same rule on `linalg.LowRank` deltas, exact, no `O x I` matrix formed; or None.
        one_pass: walks over the deltas once, one at a time, and keeps nothing of one when it asks for the next: an
            engine lays each delta over the one before it.
        needs_statistics: kinds of statistics it cannot do without.
        workspace: `(shape, n_experts, options) -> number of elements` of the compute dtype that a call holds at its
            peak, on top of the deltas it was given and including its result. `shape` ends in `O, I` for matrices.
        flops: leading term for `T` square `N x N` deltas, as in the paper's cost table.
        preset_of: name of the method of which this is a preset, for the docs.
        stages: two-stage form shared among variants, or None.
        survey: pass over the whole model, or None.
        max_experts: most experts that the rule is defined for, or None.
        base_when: `options -> bool`, under which options the rule looks at the base; None: under all, if it takes it.
        streams_when: `options -> bool`, under which options the rule takes the deltas through `linalg.places.walk`
            alone, as often as it needs to, so that the engine reads them place by place and holds none; None: under
            none.
        walks_again: of a rule that streams, whether it walks more than once: small deltas are then better held.
        combine: `(gram, *, <weights>, <options>) -> Combination`, where the rule is a sum over `D_1 .. D_T` (with
            `W_0` before them, if it takes the base) with coefficients that depend on their inner products `gram`
            alone; or None. Where it streams, the engine then adds up and writes place by place and holds nothing whole.
    """

    name: str
    merge: Callable[..., Merged]
    acts_on: ActsOn
    summary: str
    equation: str
    reference: str
    laws: frozenset[Law] = frozenset()
    merge_lowrank: Callable[..., MergedLowRank] | None = None
    one_pass: bool = False
    needs_statistics: tuple[str, ...] = ()
    workspace: Callable[[Sequence[int], int, Mapping[str, Any]], int] | None = None
    flops: str = ""
    preset_of: str | None = None
    stages: Stages | None = None
    survey: Survey | None = None
    max_experts: int | None = None
    base_when: Callable[[Mapping[str, Any]], bool] | None = None
    streams_when: Callable[[Mapping[str, Any]], bool] | None = None
    walks_again: bool = False
    combine: Callable[..., Combination] | None = None

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Keyword-only parameters of `merge`."""
        found = inspect.signature(self.merge).parameters
        if any(p.kind is p.VAR_KEYWORD for p in found.values()):
            raise TypeError(f"{self.name}: a merge function takes no **kwargs; a misspelt option must be an error")
        return {n: p for n, p in found.items() if p.kind is p.KEYWORD_ONLY}

    @cached_property
    def needs(self) -> frozenset[str]:
        """Which of `NEEDS` the rule takes."""
        return frozenset(n for n in self.parameters if n in NEEDS)

    @property
    def needs_base(self) -> bool:
        """Whether the rule takes the base weights themselves, if only under some options."""
        return "base" in self.needs

    def uses_base(self, options: Mapping[str, Any]) -> bool:
        """Whether a call with these options looks at the base, and so must be given it; other calls may go without."""
        return self.needs_base and (self.base_when is None or self.base_when(options))

    def streams(self, options: Mapping[str, Any]) -> bool:
        """Whether a call with these options walks over the deltas place by place, and holds none."""
        return self.streams_when is not None and self.streams_when(options)

    @property
    def is_random(self) -> bool:
        """Whether the rule draws random numbers (from the generator it is given)."""
        return "generator" in self.needs

    @property
    def is_weighted(self) -> bool:
        """Whether experts may carry weights."""
        return "weights" in self.needs

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Options by name, in the order of the signature."""
        hints = typing.get_type_hints(self.merge, include_extras=True)
        docs = _argument_docs(self.merge.__doc__ or "")
        out: dict[str, Option] = {}
        for name, parameter in self.parameters.items():
            if name in NEEDS:
                continue
            bounds, kind = None, hints.get(name, Any)
            if typing.get_origin(kind) is typing.Annotated:
                bounds = next((a for a in kind.__metadata__ if isinstance(a, Bounds)), None)
                kind = typing.get_args(kind)[0]
            if parameter.default is parameter.empty:
                raise TypeError(f"{self.name}: option '{name}' has no default")
            out[name] = Option(name, kind, parameter.default, bounds, docs.get(name, ""))
        return out

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid with `given`; every problem of `given` in one `RecipeError`."""
        problems = []
        for name, value in given.items():
            option = self.options.get(name)
            if option is None:
                known = ", ".join(self.options) or "none"
                hint = did_you_mean(name, self.options)
                problems.append(f"method '{self.name}' has no option '{name}'.{hint} Its options: {known}")
            elif (problem := option.problem(value)) is not None:
                problems.append(f"method '{self.name}': {problem}")
        if problems:
            raise RecipeError("The options do not fit the method.", problems)
        return {name: given.get(name, o.default) for name, o in self.options.items()}


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
    if origin is Literal:
        return any(value == v and type(value) is type(v) for v in typing.get_args(kind))
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple, Sequence) or kind in (list, tuple):
        inner = [a for a in typing.get_args(kind) if a is not Ellipsis]
        return isinstance(value, list | tuple) and all(_fits(v, inner[0]) for v in value if inner)
    return isinstance(value, kind)


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
