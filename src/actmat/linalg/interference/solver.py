"""One solver for the interference family: ACTMat, WUDI, SWUDI, ASWUDI, RegMean, LOT.

    S = sum_t w_t K_t = V diag(l) V^T          B = sum_t w_t D_t K_t
    D* = N (I - V f(l) V^T) + B V (f(l)/l) V^T  =  N + (B - N S) V (f(l)/l) V^T

A member is a point on five axes (`InterferenceRule`): the estimator of `K_t`, its normalizer, the target (always the
full delta), the spectral filter `f`, and `N`, which fills the directions that the filter leaves out.

`prepare` accumulates, `finish` solves; rules with equal `InterferenceRule.moments_key()` share one `prepare` and,
through it, one eigendecomposition. Everything that is chosen for speed is an exact re-arrangement: primal or dual
form, order of products, and a Cholesky solve if it is proven that the cut-off removes nothing.

Maps that read the same input can share one `S` (query, key and value of one attention layer): stack their deltas
along `O`, merge the tall matrix, split the result. The Gram of stacked rows is the sum of the Grams, and the rows
of `B` are independent, so nothing else is needed.

Where the deltas are far from 1, the problem is solved for the deltas times a power of two, at which float32 holds their
cubes: the same bits at any size, and records in the units of the deltas.

Low-rank deltas are solved exactly, and no `O x I` matrix is formed:

    D_t = b_t a_t = p M_t q^T        D* = p rule(M_1, ..., M_T) q^T

with orthonormal `p`, `q` from `common_bases`, because the family commutes with orthogonal changes of basis: `S`, `B`
and `N` live in the joint row space, and the eigenvalues of `S` outside it are zero, where a filter is 0. Two quantities
refer to the whole layer and use its `I`: the default cut-off and the mean eigenvalue. All small matrices are float64.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rows of one factor (or rank of one pair), `N` side of the
reduced problem (see `moments`), `P`, `Q` ranks of the common bases, `B` batch items. Leading batch axes are allowed;
every item is a separate problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actmat.errors import NumericalError, StatisticsError
from actmat.linalg.gram import column_gram
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.interference.moments import MomentForm, PrimalMoments, Reduced, StackedMoments, root_of
from actmat.linalg.interference.rule import ZERO_MEAN, InterferenceRule, weights_problem
from actmat.linalg.interference.spectral_solve import Stats, apply_gain, solve
from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.lowrank import LowRank, common_bases
from actmat.linalg.scaling import exponent_of, scaled

Moments = PrimalMoments | StackedMoments


@dataclass(slots=True)
class State:
    """Accumulated sums of one tensor; belongs to one thread."""

    items: list[Reduced]  # one problem per batch item
    shape: torch.Size  # `*batch O I`
    like: Tensor  # of the compute dtype and device
    left_BOI: Tensor | None  # buffer of all primal numerators, which a consuming `finish` turns into the result
    sum_BOI: Tensor | None  # `sum_t v_t D_t`, where the rule's fill needs it
    width: int  # in_features of the layer; more than `I` when the problem was compressed to a smaller basis
    exponents: list[int]  # per batch item: its sums are those of `D_t 2^-exponent`
    largest: list[float]  # per batch item: the largest `||D_t||_F` so far
    weight_sum: float = 0.0  # `sum_t v_t`
    squared_norms: list[float] = field(default_factory=list)  # `||D_t||_F^2` per expert, over the whole batch
    retries: Retries = ()


def prepare(
    deltas: Sequence[Tensor],
    rule: InterferenceRule,
    *,
    weights: Sequence[float] | None = None,
    grams: Sequence[Tensor] | None = None,
    factors: Sequence[Tensor] | None = None,
    products: Sequence[LowRank] | None = None,
    width: int | None = None,
) -> State:
    """Accumulate the sums of one tensor: one pass over the deltas, one alive at a time.

    Args:
        deltas: `*batch O I` each, float32 or float64.
        weights: non-negative, one per expert; they multiply `K_t` and, in the fill, `D_t`.
        grams: `I x I` or `*batch I I`, one per expert, in place of the estimates.
        factors: `*batch R I`, one per expert: the estimator's input in place of the delta, trimmed and centered.
        products: the deltas as products, for fewer operations with `grams`.
        width: in_features of the layer where `I` is the size of a compressed basis.

    Raises:
        ValueError: no deltas, or weights of the wrong number, negative or not finite.
        StatisticsError: Gram matrices of the wrong number or shape.
        NumericalError: a delta holds NaN or infinity.
    """
    if grams is not None and len(grams) != len(deltas):
        raise StatisticsError(f"expected one Gram matrix per expert ({len(deltas)}), found {len(grams)}")
    state: State | None = None
    moments: Sequence[Moments] = ()
    for index, (delta, share, squared_norms) in enumerate(check_deltas(deltas, weights)):
        if state is None:
            factor_rows = rule.estimator.rows(*(delta if factors is None else factors[0]).shape[-2:])
            form = rule.form(factor_rows, delta.shape[-1], len(deltas), has_grams=grams is not None)
            state, moments = _start(delta, rule, form, (len(deltas), factor_rows), grams is not None)
            state.width = width or state.width
        if grams is not None:
            gram_BII = _check_gram(grams, delta, index)
            _add_given(state, rule, moments, delta, None if products is None else products[index], share, gram_BII)
        else:
            _add_estimate(
                state, rule, moments, delta, share, squared_norms, None if factors is None else factors[index]
            )
        state.weight_sum += share
        state.squared_norms.append(sum(squared_norms))
    assert state is not None
    del delta  # frees it before Gram matrices of the stack are formed
    state.items = [accumulator.reduced() for accumulator in moments]
    return state


def finish(
    state: State, rule: InterferenceRule, *, base: Tensor | None = None, consume: bool = False
) -> tuple[Tensor, Stats]:
    """Solve the accumulated problems: the merged delta `*batch O I` and its record.

    Args:
        state: from `prepare` with a rule of the same `moments_key`.
        base: `W_0`, for a rule that fills with `-W_0`.
        consume: write the result over the state's numerators (the state is spent), which saves one `O x I` matrix.

    Raises:
        NumericalError: the result is not finite, or an eigensolver did not converge.
        ValueError: a fill with the mean, of weights that sum to zero.
    """
    fill = _fill(state, rule)
    out_BOI = state.left_BOI if consume else None
    records: list[Stats] = []
    retries = state.retries
    for item, reduced in enumerate(state.items):
        apply, record, new = solve(reduced, rule, state.width, state.shape[-2])
        retries += new
        if out_BOI is None:
            out_BOI = state.like.new_empty(len(state.items), *state.shape[-2:])
        fill_OI = None if fill is None else (batch_items(fill[0])[item], fill[1])
        again = rule.null == "minus_base" or (rule.needs_sum and reduced.right_NI is None)
        if consume and not again:  # a fill takes it for its eigenvectors, or as `right`
            reduced.gram_NN = None
        apply_gain(reduced, apply, out_BOI[item], fill_OI)
        del apply  # frees the eigenvectors of this item before the next one is solved
        if exponent := state.exponents[item]:
            scaled(out_BOI[item], exponent, out=out_BOI[item])
            record = _in_units_of_deltas(record, rule, exponent)
        if rule.null == "minus_base":
            assert base is not None, "a rule that fills with the base is given it"
            remove_outside(out_BOI[item], batch_items(base)[item], reduced, int(record["rank"]))
        records.append(record)
        if consume:  # frees the item's Gram matrix and spectrum before the next item makes its own
            state.items[item] = Reduced(None, None, None, reduced.form, reduced.size, reduced.dtype)
    assert out_BOI is not None, "a tensor has at least one matrix"
    value = out_BOI.view(state.shape)
    return value, {**_summary(records, state, value), **retry_stats(retries)}


def solve_lowrank(
    deltas: Sequence[LowRank], rule: InterferenceRule, *, weights: Sequence[float] | None = None
) -> tuple[LowRank, Stats]:
    """The dense answer, factored, with rank at most `sum_t R_t`. Cost `O((O + I) r'^2 + T r'^3)`, `r' = sum_t R_t`.

    The rule does not trim: the largest entries depend on the basis, so there is no exact short form.
    """
    exact, bases = [d.to(torch.float64) for d in deltas], common_bases(deltas)
    factors = None
    if rule.estimator.center:
        # (b - 1 mean(b)) a: centering acts on the rows of b. Its Gram needs only the R of b's QR, and q.
        centered = (d.b_OR - d.b_OR.mean(dim=-2, keepdim=True) for d in exact)
        rows = bases.cores[0].shape[-1]
        factors = [
            _padded(torch.linalg.qr(b).R @ core.a_RI, rows) for b, core in zip(centered, bases.cores, strict=True)
        ]
    state = prepare(bases.cores_PQ, rule, weights=weights, factors=factors, width=deltas[0].shape[-1])
    core_PQ, stats = finish(state, rule, consume=True)
    return bases.lift(core_PQ).to(deltas[0].b_OR.dtype), stats


def solve_lowrank_with_grams(
    deltas: Sequence[LowRank],
    grams: Sequence[Tensor],
    rule: InterferenceRule,
    *,
    weights: Sequence[float] | None = None,
    roots: Sequence[Tensor] | None = None,
) -> tuple[LowRank, Stats]:
    """The dense answer where `K_t` is given, factored, with rank at most `sum_t R_t`.

    `S` is a full `I x I` matrix, which no basis of the deltas' rows reduces: `q^T S^+ q` is not `(q^T S q)^+`. Only
    the deltas' rows are compressed: `D* = p ((sum_t w_t (p^T b_t) (a_t K_t)) S^+)`. Cost `O(O r'^2 + r' I^2 + I^3)`.

    Args:
        roots: `Z_t`, `N I`, with `Z_t^T Z_t = K_t`. If they have fewer than `I` rows together, `S` is that of the
            stacked rows, and the cost is `O(O r'^2 + I N'^2)`, `N' = sum_t (N_t + R_t)`.
    """
    exact = [d.to(torch.float64) for d in deltas]
    p_OP = torch.linalg.qr(torch.cat([d.b_OR for d in exact], dim=-1)).Q
    cores_PI = [LowRank(p_OP.mT @ d.b_OR, d.a_RI) for d in exact]
    state = None if roots is None or rule.off_diagonal != 1 else _state_of_rows(cores_PI, roots, rule, weights)
    if state is None:
        state = prepare([d.dense() for d in cores_PI], rule, weights=weights, grams=grams, products=cores_PI)
    core_PI, stats = finish(state, rule, consume=True)
    return LowRank(p_OP, core_PI).to(deltas[0].b_OR.dtype), stats


def _state_of_rows(
    cores_PI: Sequence[LowRank], roots: Sequence[Tensor], rule: InterferenceRule, weights: Sequence[float] | None
) -> State | None:
    """The problem of given `K_t = Z_t^T Z_t` in its dual form, `N = sum_t (N_t + R_t)`; None where that is no smaller.

    The prior's `D_t^T D_t` has the root `R(b_t) a_t`, from the QR decomposition of `b_t`.
    """
    dense = [d.dense() for d in cores_PI]
    factors, left, squares = [], [], []
    for t, (_, share, squared_norms) in enumerate(check_deltas(dense, weights)):
        factor_NI = roots[t].double()
        trace = float(factor_NI.square().sum())
        if rule.prior and squared_norms[0]:
            own_RI = root_of(cores_PI[t]) * math.sqrt(rule.prior * trace / squared_norms[0])
            factor_NI = torch.cat([factor_NI, own_RI])
        factors.append(factor_NI * math.sqrt(share * rule.gram_weight(trace)))
        left.append(cores_PI[t].b_OR @ (cores_PI[t].a_RI @ factors[-1].mT))
        squares.append(squared_norms[0])
    rows_NI = torch.cat(factors)
    if len(rows_NI) >= rows_NI.shape[-1]:
        return None
    reduced = Reduced(torch.cat(left, dim=-1), column_gram(rows_NI.mT), rows_NI, "dual", len(rows_NI), rows_NI.dtype)
    return State([reduced], dense[0].shape, rows_NI, None, None, rows_NI.shape[-1], [0], [0.0], squared_norms=squares)


def _padded(factor_RQ: Tensor, rows: int) -> Tensor:
    """Zero rows below, so that experts of different rank have factors of one height."""
    return torch.nn.functional.pad(factor_RQ, (0, 0, 0, max(0, rows - factor_RQ.shape[-2])))


def _start(
    delta: Tensor, rule: InterferenceRule, form: MomentForm, stack: tuple[int, int], has_grams: bool
) -> tuple[State, Sequence[Moments]]:
    """An empty state, and one accumulator per batch item (`stack`: experts, rows of each factor)."""
    rows, columns = delta.shape[-2:]
    count = math.prod(delta.shape[:-2])
    moments: Sequence[Moments]
    left_BOI = None
    if form == "primal":
        left_BOI = delta.new_empty(count, rows, columns)
        needs_term = has_grams or PrimalMoments.needs_term(stack[1], columns)
        term_II = delta.new_empty(columns, columns) if needs_term else None
        moments = [PrimalMoments(left_BOI[item], term_II) for item in range(count)]
    else:
        moments = [StackedMoments(form, rows, *stack, delta) for _ in range(count)]
    sum_BOI = delta.new_zeros(count, rows, columns) if rule.needs_sum else None
    state = State([], delta.shape, delta.new_empty(0), left_BOI, sum_BOI, columns, [0] * count, [0.0] * count)
    return state, moments


def _add_given(
    state: State,
    rule: InterferenceRule,
    moments: Sequence[Moments],
    delta: Tensor,
    product: LowRank | None,
    share: float,
    gram_BII: Tensor,
) -> None:
    """Add one expert with given Gram matrices to the sums of all batch items."""
    for item, delta_OI in enumerate(batch_items(delta)):
        accumulator, gram_II = moments[item], gram_BII[item]
        assert isinstance(accumulator, PrimalMoments), "given Gram matrices take the primal form"
        weight = check_weight(share * rule.gram_weight(float(gram_II.diagonal().double().sum())), delta.dtype)
        of_item = delta_OI
        if product is not None:
            of_item = LowRank(batch_items(product.b_OR)[item], batch_items(product.a_RI)[item])
        accumulator.add_gram(of_item, gram_II, weight, rule.off_diagonal, rule.prior)
        if state.sum_BOI is not None:
            state.sum_BOI[item].add_(delta_OI, alpha=share)


def _add_estimate(
    state: State,
    rule: InterferenceRule,
    moments: Sequence[Moments],
    delta: Tensor,
    share: float,
    squared_norms: Sequence[float],
    factor: Tensor | None,
) -> None:
    """Add one expert's estimates to the sums of all batch items."""
    for item, delta_OI in enumerate(batch_items(delta)):
        given_RI = None if factor is None else batch_items(factor)[item]
        in_unit_OI = _add(state, rule, moments[item], item, delta_OI, share, squared_norms[item], given_RI)
        if state.sum_BOI is not None:
            state.sum_BOI[item].add_(in_unit_OI, alpha=share)


def _add(
    state: State,
    rule: InterferenceRule,
    accumulator: Moments,
    item: int,
    delta_OI: Tensor,
    share: float,
    squared_norm: float,
    given_RI: Tensor | None,
) -> Tensor:
    """Add one expert's estimate to the sums of a batch item; returns the delta in the item's unit."""
    estimate, norm = rule.estimator, math.sqrt(squared_norm)
    if norm > state.largest[item]:
        step = state.exponents[item] - exponent_of(norm)
        if step and state.largest[item] > 0:  # else there are only zeros so far
            accumulator.rescale(step, step * estimate.degree)
            if state.sum_BOI is not None:
                scaled(state.sum_BOI[item], step, out=state.sum_BOI[item])
        state.exponents[item] -= step
        state.largest[item] = norm
    unit = -state.exponents[item]
    delta_OI = scaled(delta_OI, unit)
    # the normalizer brings every expert's estimate to the same size, so that each is formed in a unit of its own
    shift = exponent_of(norm * 2.0**unit) if estimate.normalize == "norm" else 0
    if given_RI is None:
        factor_RI, new = estimate.factor(scaled(delta_OI, -shift))
    else:
        factor_RI, new = estimate.powered(scaled(given_RI, unit - shift))
    weight = share * estimate.weight(squared_norm * 4.0 ** (unit - shift)) * 2.0 ** (shift * estimate.degree)
    accumulator.add(delta_OI, factor_RI, check_weight(weight, delta_OI.dtype))
    state.retries += new
    return delta_OI


def check_weight(weight: float, dtype: torch.dtype) -> float:
    """Return the weight, if the compute dtype holds it.

    Raises:
        NumericalError: it does not.
    """
    if weight <= torch.finfo(dtype).max:
        return weight
    raise NumericalError(
        f"the weight of an expert's estimate, {weight:g}, is beyond {str(dtype).removeprefix('torch.')}'s range "
        f"({torch.finfo(dtype).max:g}). Likely cause: weights far from 1, or deltas of very different sizes with "
        "normalize='norm'. Fix: weights near 1, or compute in float64."
    )


def _in_units_of_deltas(record: Stats, rule: InterferenceRule, exponent: int) -> Stats:
    """The record of a problem that was solved for the deltas times `2^-exponent`."""
    of_gram = exponent * rule.estimator.degree
    powers = {"cutoff": of_gram, "ridge": of_gram}
    if not rule.spectral.time_is_absolute:
        powers["time"] = -of_gram
    return {n: x * 2.0 ** powers[n] if n in powers and not isinstance(x, str) else x for n, x in record.items()}


def _fill(state: State, rule: InterferenceRule) -> tuple[Tensor, float] | None:
    """`(X, a)` for `N = a X`, or None for `N = 0` (and for `N = -W_0`, which `remove_outside` adds)."""
    if not rule.needs_sum:
        return None
    assert state.sum_BOI is not None, "the state was prepared for a rule that fills with the sum"
    if rule.null == "mean" and state.weight_sum == 0:
        raise ValueError(ZERO_MEAN)
    return state.sum_BOI, 1.0 if rule.null == "sum" else 1.0 / state.weight_sum


def remove_outside(out_OI: Tensor, base_OI: Tensor, reduced: Reduced, rank: int) -> None:
    """`out -= W_0 (I - V V^T)`, in place, `V` the `rank` leading eigenvectors of `S`; no change if they are all.

    By the eigenvectors: `W_0 - W_0 S S^+` would carry the rounding of `S`, which is large against a delta.
    """
    width = base_OI.shape[-1]
    if rank == width:
        return
    out_OI.sub_(base_OI)
    if rank:
        vectors_IK = reduced.coordinates(torch.eye(width, dtype=base_OI.dtype, device=base_OI.device), rank)
        out_OI.add_((base_OI @ vectors_IK) @ vectors_IK.mT)


def _summary(records: Sequence[Stats], state: State, value: Tensor) -> Stats:
    """One record for the tensor: that of its only item, or the extremes over the batch."""
    out: Stats = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [r[name] for r in records if name in r]
        numbers = [float(x) for x in values if not isinstance(x, str)]
        if len(numbers) == len(values) and min(numbers) != max(numbers):
            out[name], out[f"{name}_max"] = min(numbers), max(numbers)
        elif len(set(values)) > 1:
            out[name] = " | ".join(sorted({str(x) for x in values}))
        else:
            out[name] = values[0]
    norm = frobenius_norm64(value)
    if not math.isfinite(norm):
        raise NumericalError(
            f"expected a finite merged delta, found norm {norm} from finite deltas. Likely cause: products of "
            "their entries overflow the compute dtype, or the statistics hold NaN. Fix: compute in float64."
        )
    out["norm"] = norm
    out["mean_expert_norm"] = sum(math.sqrt(n) for n in state.squared_norms) / len(state.squared_norms)
    return out


def batch_items(tensor: Tensor) -> Tensor:
    """`*batch M N` as `B M N`."""
    return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.flatten(0, -3)


def check_deltas(
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
    if problem := weights_problem(shares):
        raise ValueError(problem)
    for index, share in enumerate(shares):  # not over zip, whose result tuple keeps an older delta alive
        delta = deltas[index]
        squares = [frobenius_norm64(m) ** 2 for m in batch_items(delta)]
        if not math.isfinite(sum(squares)):
            raise NumericalError(
                f"expected finite deltas, but that of expert {index} (counted from 0) holds NaN or infinity. "
                "Likely cause: a diverged or damaged expert. Fix: check that checkpoint, or leave the expert out."
            )
        yield delta, share, squares


def _check_gram(grams: Sequence[Tensor], delta: Tensor, index: int) -> Tensor:
    """Gram matrix `index` as `B I I`, with the batch axes of the delta.

    Raises:
        StatisticsError: its shape does not fit the delta.
    """
    gram, width, batch = grams[index], delta.shape[-1], delta.shape[:-2]
    if gram.shape[-2:] != (width, width) or (gram.dim() > 2 and gram.shape[:-2] != batch):
        raise StatisticsError(
            f"expected a Gram matrix of shape ({width}, {width}), one per input feature, or with the batch axes "
            f"{tuple(batch)} before it; expert {index} has {tuple(gram.shape)}. Likely cause: statistics of another "
            "layer or model, or a transposed weight. Fix: collect the statistics again for this model."
        )
    return batch_items(gram.expand(*batch, width, width))
