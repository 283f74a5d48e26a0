"""Facets of a method's declaration: laws, faster forms, reading, cost. See `MergeMethod`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from actmat.linalg.lowrank import LowRank

ActsOn = Literal["matrix", "tensor", "elementwise"]
"""matrix: `*batch O I`, a logical linear map; tensor: a whole tensor of any shape; elementwise: every entry of the
result depends only on the same entry of the inputs, so that the engine may pass flat chunks of any size."""

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

LINEAR_LAWS: frozenset[Law] = frozenset(
    {"permutation", "homogeneous", "odd", "left_orthogonal", "right_orthogonal", "zeros"}
)
"""Laws that a sum of the deltas and their mean have in common."""
MEAN_LAWS: frozenset[Law] = LINEAR_LAWS | {"single", "identical"}
SUM_LAWS: frozenset[Law] = LINEAR_LAWS | {"zero_expert"}

Options = Mapping[str, Any]
Elsewhere = Literal["mean", "share", "own"] | float | Sequence[float]
"""Elementwise counterpart of a method, for tensors that it does not act on (norms, biases, embeddings, kernels):

mean: `sum_t w_t D_t / sum_t w_t`; share: `sum_t w_t D_t / T`, the mean of experts without weights; own: the method
itself; a number: that many times `sum_t w_t D_t`; one number per expert: `sum_t c_t D_t`."""


def MEAN(options: Mapping[str, Any], n_experts: int) -> Elsewhere:
    """Counterpart of methods that average."""
    return "mean"


When = bool | Callable[..., bool]
"""A property of a method: always, never, or a function of the arguments named in its documentation."""


def holds(when: When, *arguments: Any) -> bool:
    """True if the property holds for these arguments."""
    return when if isinstance(when, bool) else when(*arguments)


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged delta and its record (rank kept, cut-off, residual, ...)."""

    value: Tensor
    stats: Mapping[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MergedLowRank:
    """A merged delta in factored form, and the record that the dense merge would give."""

    value: LowRank
    stats: Mapping[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Combination:
    """A merged delta as a sum: coefficients of the tensors of its basis, and its record."""

    coefficients: Sequence[float]
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stages:
    """A method in two stages, `merge = finish(prepare(deltas, **opts), **opts)`, so that variants share the first.

    `prepare` depends on the options only through `key(options)`: variants with equal keys share one `prepare`.
    `finish` must not change the state. Both take all needs and options of the method.
    """

    key: Callable[[Mapping[str, Any]], Hashable]
    prepare: Callable[..., Any]
    finish: Callable[..., Merged]


@dataclass(frozen=True, slots=True)
class Survey:
    """Passes over all tensors of a merge before the first is merged (thresholds over the whole model).

    `applies(options)` is True for options that need it. `start(n_experts, options)` makes the state;
    `observe(state, deltas, options)` adds one tensor; `advance(state)` ends a round and returns True when another
    round is needed; `finish(state)` returns the value that every merge call then receives as `survey=`.

    Several workers share a round: `fork(state)` gives each an empty state of the same round, and `join(state, other)`
    adds what a fork observed, which is not used afterwards. States pickle, and one thread at a time uses a state.
    Observations must be commutative (integer counts), so that neither the order nor the shares change the result.
    """

    applies: Callable[[Mapping[str, Any]], bool]
    start: Callable[[int, Mapping[str, Any]], Any]
    observe: Callable[[Any, Sequence[Tensor], Mapping[str, Any]], None]
    fork: Callable[[Any], Any]
    join: Callable[[Any, Any], None]
    advance: Callable[[Any], bool]
    finish: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class LowRankForm:
    """The same merge of `LowRank` deltas, exact, without forming an `O x I` matrix.

    Args:
        merge: takes the needs and options of the dense merge.
        why_not: `(options, n_experts, weights) -> reason` for which `merge` does not apply, in one sentence without a
            full stop, or None if it applies; `merge` raises ValueError exactly if there is a reason. None: it applies
            under all options.
        keeps_row_space: every row of the result lies in the span of the rows of all deltas, so that maps which are
            packed into one tensor and merged separately still share their rows.
        meets_all: of `options`; experts with linearly independent row spaces are all reproduced exactly, so that
            positive weights have no effect on them.
    """

    merge: Callable[..., MergedLowRank]
    why_not: Callable[[Options, int, Sequence[float] | None], str | None] | None = None
    keeps_row_space: bool = True
    meets_all: When = False


@dataclass(frozen=True, slots=True)
class Access:
    """Reading of the deltas and the base.

    Args:
        one_pass: iterates over the deltas once, one at a time, and keeps no reference to a delta when it requests the
            next: an engine reads each delta into the memory of the one before it.
        streams: of `options`; the deltas are read by `linalg.chunks.walk` only, as often as needed, so that the engine
            reads them chunk by chunk and holds none.
        walks_again: of a method that streams: it walks more than once, so that small deltas are better held.
        base: of `options`; the base is read, if `merge` takes it.
        moves_base: of `options`; zero deltas of all experts may still change the base.
        baseless: of `(options as given, n_experts)`; `W* = W_0 + D*` is the same for any `W_0`, so that experts merge
            without a base.
    """

    one_pass: bool = False
    streams: When = False
    walks_again: bool = False
    base: When = True
    moves_base: When = False
    baseless: When = False


def _size(shape: Sequence[int], n_experts: int, options: Options) -> int:
    return math.prod(shape)


@dataclass(frozen=True, slots=True)
class MethodCost:
    """Memory and operations of a call: functions of shapes.

    Args:
        workspace: `(shape, n_experts, options) -> number of elements` of the compute dtype that a call holds at its
            peak, on top of the given deltas and including its result, which is all by default. `shape` ends in `O, I`
            for matrices.
        products: `options -> (per expert, once)`, the time of a call in products of the matrix with a square one of
            side `N`, or of its short side; a thin singular value decomposition takes six. Default: none, but a pass per
            expert.
        side: `(shape, n_experts, options) -> N`, side of the largest symmetric matrix whose spectrum is computed; 0 for
            none. Default: the short side.
    """

    workspace: Callable[[Sequence[int], int, Options], int] = _size
    products: Callable[[Options], tuple[float, float]] = lambda options: (0, 0)
    side: Callable[[Sequence[int], int, Options], int] = lambda shape, n_experts, options: min(shape[-2:])

    def operations(self, shape: Sequence[int], n_experts: int, options: Options) -> float:
        """Floating-point operations of a call on `*batch O I`, or on a tensor of any shape; a guide.

        >>> MethodCost(products=lambda options: (2, 1)).operations((8, 4), 3, {})
        1888
        """
        per_expert, once = self.products(options)
        side = self.side(shape, n_experts, options) or min(shape[-2:])
        in_products = 2 * side * (per_expert * n_experts + once)
        return math.prod(shape) * (n_experts + in_products)
