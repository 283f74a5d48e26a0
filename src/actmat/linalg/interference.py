"""One solver for the interference family: ACTMat, TACT, ACE, WUDI, SWUDI, ASWUDI, RegMean, LOT.

    S = sum_t w_t K_t = V diag(l) V^T          B = sum_t w_t D_t K_t
    D* = N (I - V f(l) V^T) + B V (f(l)/l) V^T  =  N + (B - N S) V (f(l)/l) V^T

A member is a point on five axes (`Rule`): the estimator of `K_t`, its normaliser, the target (always the full
delta), the spectral filter `f`, and `N`, which fills the directions that the filter leaves out.

`prepare` accumulates, `finish` solves; rules with equal `Rule.moments_key()` share one `prepare` and, through it, one
eigendecomposition. Everything that is chosen for speed is an exact re-arrangement: primal or dual form, order of
products, and a Cholesky solve where it is proven that the cut-off removes nothing.

Maps that read the same input can share one `S` (query, key and value of one attention layer): stack their deltas
along `O`, merge the tall matrix, split the result. The Gram of stacked rows is the sum of the Grams, and the rows
of `B` are independent, so nothing else is needed.

Shapes: `T` experts, `O` out_features, `I` in_features, `N` side of the reduced problem (see `moments`).
Leading batch axes are allowed; every item of a batch is a problem of its own, solved by itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actmat.errors import NumericalError, StatisticsError
from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.moments import Form, PrimalMoments, Reduced, StackedMoments, form_for
from actmat.linalg.spectral_solve import Stats, solve

__all__ = ["Null", "Rule", "Solution", "Solver", "State", "batch_items", "checked_deltas", "finish", "prepare"]

Null = Literal["zero", "sum", "mean"]
"""`N`: nothing (the base weights stay), `sum_t v_t D_t`, or `sum_t v_t D_t / sum_t v_t`, `v_t` the user's weights."""

Solver = Literal["auto", "eigh", "stacked", "dual"]
"""auto: the cheapest; eigh: of `S`, always; dual: of `A A^T`; stacked: SVD of the stacked factors `A`, never squared.

On steep spectra in float32, stacked is the most accurate, and dual the least where the rows of `A` are dependent:
ask for dual only where all rows together are fewer than `I`, as auto does."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One member of the family.

    Args:
        estimator: how `w_t K_t` comes from `D_t`; unused where Gram matrices are given.
        spectral: the filter `f`.
        null: the fill `N`.
        solver: which exact form to use.
        off_diagonal: factor on the off-diagonal entries of given Gram matrices.
        per_trace: divide each given Gram matrix by its trace.
        bounded: scale the result down to `||N||_F`, per matrix, where it is longer; for `null` other than "zero".
    """

    estimator: Estimator = field(default_factory=Estimator)
    spectral: Filter = field(default_factory=Filter)
    null: Null = "zero"
    solver: Solver = "auto"
    off_diagonal: float = 1.0
    per_trace: bool = False
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.bounded and self.null == "zero":
            raise ValueError("a bounded rule needs a fill to be bounded by: null='sum' or 'mean', not 'zero'")

    def moments_key(self) -> Hashable:
        """What the accumulated state depends on."""
        return ("interference", self.estimator, self.null != "zero", self.solver, self.off_diagonal, self.per_trace)

    def gram_weight(self, gram_II: Tensor) -> float:
        """The normaliser of a given Gram matrix."""
        if not self.per_trace:
            return 1.0
        trace = float(gram_II.diagonal().double().sum())
        return 1.0 / trace if trace > 0 else 0.0

    def form(self, factor_rows: int, width: int, n_experts: int, *, has_grams: bool = False) -> Form:
        """The form taken for `n_experts` factors of `factor_rows x width`."""
        if has_grams or self.solver == "eigh":
            return "primal"
        if self.solver == "auto":
            return form_for(factor_rows, n_experts, width)
        return self.solver


@dataclass(slots=True)
class State:
    """Accumulated sums of one tensor. Belongs to one thread.

    Args:
        items: one reduced problem per batch item.
        shape: `*batch O I`.
        like: a tensor of the compute dtype and device.
        left_BOI: buffer of all primal numerators, which a consuming `finish` turns into the result; or None.
        sum_BOI: `sum_t v_t D_t`, where the rule's fill needs it.
        weight_sum: `sum_t v_t`.
        width: in_features of the layer; more than `I` when the problem was compressed to a smaller basis.
        squared_norms: `||D_t||_F^2` per expert, over the whole batch.
        retries: of the decompositions made so far.
    """

    items: list[Reduced]
    shape: torch.Size
    like: Tensor
    left_BOI: Tensor | None
    sum_BOI: Tensor | None
    weight_sum: float
    width: int
    squared_norms: list[float]
    retries: Retries


@dataclass(frozen=True, slots=True)
class Solution:
    """A merged delta `*batch O I` and its record."""

    value: Tensor
    stats: Stats


def prepare(
    deltas: Sequence[Tensor],
    rule: Rule,
    *,
    weights: Sequence[float] | None = None,
    grams: Sequence[Tensor] | None = None,
    factors: Sequence[Tensor] | None = None,
    width: int | None = None,
) -> State:
    """Accumulate the sums of one tensor: one pass over the deltas, one alive at a time.

    Args:
        deltas: `*batch O I` each, float32 or float64. Entries below 1e-12 underflow in float32 when cubed.
        rule: the member of the family.
        weights: non-negative, one per expert; they multiply `K_t` and, in the fill, `D_t`.
        grams: `I x I` or `*batch I I`, one per expert, in place of the estimates.
        factors: `*batch R I`, one per expert: the estimator's input in place of the delta, already trimmed and centred.
        width: in_features of the layer where `I` is the size of a compressed basis.

    Raises:
        ValueError: no deltas, or weights of the wrong number, negative or not finite.
        StatisticsError: Gram matrices of the wrong number or shape.
        NumericalError: a delta holds NaN or infinity.
    """
    if grams is not None and len(grams) != len(deltas):
        raise StatisticsError(f"expected one Gram matrix per expert ({len(deltas)}), found {len(grams)}")
    state: State | None = None
    moments: list[PrimalMoments | StackedMoments] = []
    for index, (delta, share, squared_norms) in enumerate(checked_deltas(deltas, weights)):
        if state is None:
            factor_rows = rule.estimator.rows(*(delta if factors is None else factors[0]).shape[-2:])
            form = rule.form(factor_rows, delta.shape[-1], len(deltas), has_grams=grams is not None)
            state, moments = _start(delta, rule, form, (len(deltas), factor_rows), width, grams is not None)
        gram = None if grams is None else batch_items(_checked_gram(grams[index], delta, index))
        factor = None if factors is None else batch_items(factors[index])
        for item, matrix_OI in enumerate(batch_items(delta)):
            accumulator = moments[item]
            if gram is not None:
                assert isinstance(accumulator, PrimalMoments), "given Gram matrices take the primal form"
                weight = share * rule.gram_weight(gram[item])
                accumulator.add_gram(matrix_OI, gram[item], weight, rule.off_diagonal)
            else:
                estimator = rule.estimator
                a_RI, retries = estimator.factor(matrix_OI) if factor is None else estimator.powered(factor[item])
                state.retries += retries
                accumulator.add(matrix_OI, a_RI, share * estimator.weight(squared_norms[item]))
            if state.sum_BOI is not None:
                state.sum_BOI[item].add_(matrix_OI, alpha=share)
        state.weight_sum += share
        state.squared_norms.append(sum(squared_norms))
    assert state is not None
    for accumulator in moments:
        if isinstance(accumulator, PrimalMoments):
            state.items.append(accumulator.reduced())
        else:
            assert form != "primal"
            state.items.append(accumulator.reduced(form))
    return state


def finish(state: State, rule: Rule, *, fill: tuple[Tensor, float] | None = None, consume: bool = False) -> Solution:
    """Solve the accumulated problems.

    Args:
        state: from `prepare` with a rule of the same `moments_key`.
        rule: the member of the family.
        fill: `(X, a)` takes `N = a X` in place of the rule's null policy.
        consume: write the result over the state's numerators (the state is spent), which saves one `O x I` matrix.

    Raises:
        NumericalError: the result is not finite, or an eigensolver did not converge.
        ValueError: the mean was asked for with weights that sum to zero.
    """
    if fill is None and rule.null != "zero":
        assert state.sum_BOI is not None, "the state was prepared for a rule that fills with the sum"
        if rule.null == "mean" and state.weight_sum == 0:
            raise ValueError("null='mean' divides by the sum of the weights, which is zero; give a positive weight")
        fill = (state.sum_BOI, 1.0 if rule.null == "sum" else 1.0 / state.weight_sum)
    rows, columns = state.shape[-2:]
    if consume and state.left_BOI is not None:
        out_BOI = state.left_BOI
    else:
        out_BOI = state.like.new_empty(len(state.items), rows, columns)
    records: list[Stats] = []
    retries = state.retries
    for item, reduced in enumerate(state.items):
        fill_OI = None if fill is None else (fill[0].reshape(-1, rows, columns)[item], fill[1])
        record, new = solve(reduced, rule.spectral, state.width, out_BOI[item], fill_OI, rule.solver == "auto")
        if rule.bounded and fill_OI is not None:
            record |= _bound(out_BOI[item], fill_OI[1] * frobenius_norm64(fill_OI[0]))
        records.append(record)
        retries += new
        if consume:  # frees the item's Gram matrix and spectrum before the next one makes its own
            state.items[item] = Reduced(reduced.left_ON[:0], None, None, reduced.form)
    value = out_BOI.view(state.shape)
    return Solution(value, {**_summary(records, state, value), **retry_stats(retries)})


def _bound(merged_OI: Tensor, limit: float) -> Stats:
    """Scale the matrix down, in place, to a norm of at most `limit`; what was found."""
    norm = frobenius_norm64(merged_OI)
    if norm > limit:
        merged_OI.mul_(limit / norm)
    return {"norm_before_bound": norm, "norm_bound": limit}


def _start(
    delta: Tensor, rule: Rule, form: Form, stack: tuple[int, int], width: int | None, has_grams: bool
) -> tuple[State, list[PrimalMoments | StackedMoments]]:
    """An empty state, and one accumulator per batch item (`stack`: experts, rows of each factor)."""
    rows, columns = delta.shape[-2:]
    count = math.prod(delta.shape[:-2])
    moments: list[PrimalMoments | StackedMoments]
    left = None
    if form == "primal":
        left = delta.new_empty(count, rows, columns)
        needs_term = has_grams or PrimalMoments.needs_term(stack[1], columns)
        term = delta.new_empty(columns, columns) if needs_term else None
        moments = [PrimalMoments(left[item], term) for item in range(count)]
    else:
        moments = [StackedMoments(rows, *stack, delta) for _ in range(count)]
    total = None if rule.null == "zero" else delta.new_zeros(count, rows, columns)
    state = State([], delta.shape, delta.new_empty(0), left, total, 0.0, width or columns, [], ())
    return state, moments


def batch_items(tensor: Tensor) -> Tensor:
    """`*batch M N` -> `B M N`."""
    return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.flatten(0, -3)


def checked_deltas(
    deltas: Sequence[Tensor], weights: Sequence[float] | None
) -> Iterator[tuple[Tensor, float, list[float]]]:
    """Each delta, once, with its weight and `||D_t||_F^2` per batch item (summed in float64).

    Raises:
        ValueError: no deltas, or weights of the wrong number, negative or not finite.
        NumericalError: a delta holds NaN or infinity.
    """
    if not len(deltas):
        raise ValueError("a merge needs at least one expert; found no delta")
    shares = [1.0] * len(deltas) if weights is None else [float(w) for w in weights]
    if len(shares) != len(deltas):
        raise ValueError(f"expected one weight per expert ({len(deltas)}), found {len(shares)}")
    if bad := [w for w in shares if not (math.isfinite(w) and w >= 0)]:
        raise ValueError(
            f"the interference family needs finite weights >= 0 (they weight semidefinite matrices), found {bad}"
        )
    for index, share in enumerate(shares):  # not over zip, whose result tuple keeps an older delta alive
        delta = deltas[index]
        squares = [frobenius_norm64(m) ** 2 for m in batch_items(delta)]
        if not math.isfinite(sum(squares)):
            raise NumericalError(
                f"expected finite deltas, but that of expert {index} (counted from 0) holds NaN or infinity. "
                "Likely cause: a diverged or damaged expert. Fix: check that checkpoint, or leave the expert out."
            )
        yield delta, share, squares


def _checked_gram(gram: Tensor, delta: Tensor, index: int) -> Tensor:
    """The Gram matrix with the delta's batch axes."""
    width = delta.shape[-1]
    batch = delta.shape[:-2]
    if gram.shape[-2:] != (width, width) or (gram.dim() > 2 and gram.shape[:-2] != batch):
        raise StatisticsError(
            f"expected a Gram matrix of shape ({width}, {width}), one per input feature, or with the batch axes "
            f"{tuple(batch)} before it; expert {index} has {tuple(gram.shape)}. Likely cause: statistics of another "
            "layer or model, or a transposed weight. Fix: collect the statistics again for this model."
        )
    return gram.expand(*batch, width, width)


def _summary(records: Sequence[Stats], state: State, value: Tensor) -> Stats:
    """One record for the tensor: that of its only item, or the extremes over the batch."""
    out: Stats = {}
    for name in dict.fromkeys(name for record in records for name in record):
        found = [r[name] for r in records if name in r]
        numbers = [float(x) for x in found if not isinstance(x, str)]
        if len(numbers) == len(found) and min(numbers) != max(numbers):
            out[name], out[f"{name}_max"] = min(numbers), max(numbers)
        elif len(set(found)) > 1:
            out[name] = " | ".join(sorted({str(x) for x in found}))
        else:
            out[name] = found[0]
    norm = frobenius_norm64(value)
    if not math.isfinite(norm):
        raise NumericalError(
            f"expected a finite merged delta, found norm {norm} from finite deltas. Likely cause: products of "
            "their entries overflow the compute dtype, or the statistics hold NaN. Fix: compute in float64."
        )
    out["norm"] = norm
    out["mean_expert_norm"] = sum(math.sqrt(n) for n in state.squared_norms) / len(state.squared_norms)
    return out
