"""Methods without results of their authors' code in tests/parity, against naive transcriptions of their papers.

Every transcription is written from the paper's equations, with loops over experts, entries or samples, in float64, and
shares no code with the package. Random methods are transcribed given their masks, which are read off the method itself
(one expert with weight 1, no rescaling); the law of the masks is tested in test_dare.py and test_della.py.

Shapes: `T` experts, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import F32_PRODUCT, F32_SOLVE, F64_IDENTITY, F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.adamerging import ADAMERGING, AdamState, adam_step, coefficient_gradient, entropy
from actmat.extras.research.cat import CAT
from actmat.extras.research.della import DELLA
from actmat.methods import get_method
from actmat.methods.contract import MergeMethod
from actmat.methods.dare import DARE

ACTMAT = get_method("actmat")
ACTMAT_RIDGE = get_method("actmat_ridge")
LOT = get_method("lot")

EPS32 = 2.0**-23
Matrix = list[list[float]]

PRECISION = [(torch.float64, F64_ORACLE), (torch.float32, F32_SOLVE)]
CASES = {
    "square": (3, 8, 8),
    "tall": (2, 11, 6),
    "wide": (2, 4, 10),
    "one": (1, 5, 6),
}


def experts(case: str, dtype: torch.dtype) -> list[Tensor]:
    """Deltas of one case, the last of several an expert that did not move in "tall"."""
    deltas = random_deltas(*CASES[case], seed=11)
    if case == "tall":
        deltas.append(torch.zeros_like(deltas[0]))
    return [d.to(dtype) for d in deltas]


def rows(x: Tensor) -> Matrix:
    found: Matrix = x.double().tolist()
    return found


def product(a: Matrix, b: Matrix) -> Matrix:
    return [[math.fsum(x * b[k][j] for k, x in enumerate(row)) for j in range(len(b[0]))] for row in a]


def transpose(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def plus(a: Matrix, b: Matrix, factor: float = 1.0) -> Matrix:
    return [[x + factor * y for x, y in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def zeros(n: int, m: int) -> Matrix:
    return [[0.0] * m for _ in range(n)]


def solve(left: Matrix, square: Matrix) -> Matrix:
    """`left square^-1` by Gaussian elimination with pivots."""
    size = len(square)
    system = [[*transpose(square)[i], *transpose(left)[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(system[r][column]))
        system[column], system[pivot] = system[pivot], system[column]
        for r in range(size):
            if r != column:
                factor = system[r][column] / system[column][column]
                system[r] = [x - factor * y for x, y in zip(system[r], system[column], strict=True)]
    return transpose([[x / system[i][i] for x in system[i][size:]] for i in range(size)])


def pseudo_inverse(square: Matrix, rtol: float) -> Matrix:
    """By the sum over eigenvectors above the cut-off, one at a time."""
    values, vectors = torch.linalg.eigh(torch.tensor(square, dtype=torch.float64))
    found = zeros(len(square), len(square))
    for value, v in zip(values.tolist(), vectors.T.tolist(), strict=True):
        if value > rtol * float(values[-1]):
            found = plus(found, [[x * y / value for y in v] for x in v])
    return found


def tensor(a: Matrix) -> Tensor:
    return torch.tensor(a, dtype=torch.float64)


def sums(deltas: Sequence[Matrix], grams: Sequence[Matrix]) -> tuple[Matrix, Matrix]:
    """`sum_t D_t K_t` and `sum_t K_t`."""
    left, gram = zeros(len(deltas[0]), len(deltas[0][0])), zeros(len(grams[0]), len(grams[0]))
    for delta, own in zip(deltas, grams, strict=True):
        left, gram = plus(left, product(delta, own)), plus(gram, own)
    return left, gram


def self_gram(delta: Matrix) -> Matrix:
    return product(transpose(delta), delta)


def ridge_of(gram: Matrix, ridge: float) -> Matrix:
    """`S + ridge tr(S) / I`."""
    level = ridge * math.fsum(gram[i][i] for i in range(len(gram))) / len(gram)
    return [[x + level * (i == j) for j, x in enumerate(row)] for i, row in enumerate(gram)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "bound"), PRECISION)
def test_actmat_ridge(case: str, dtype: torch.dtype, bound: float) -> None:
    """`D* = (sum D_t D_t^T D_t)(sum D_t^T D_t + ridge tr(S)/I)^-1`."""
    deltas = experts(case, dtype)
    left, gram = sums([rows(d) for d in deltas], [self_gram(rows(d)) for d in deltas])
    for ridge in (0.01, 0.1, 1.0):
        expected = tensor(solve(left, ridge_of(gram, ridge)))
        assert relative_error(call(ACTMAT_RIDGE, deltas, ridge=ridge), expected) < bound


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "bound"), PRECISION)
def test_centered(case: str, dtype: torch.dtype, bound: float) -> None:
    """The authors of ACTMat compare with ACE's estimate: the scatter of the rows of a delta about their mean."""
    deltas = experts(case, dtype)
    lists, scatters = [rows(d) for d in deltas], []
    for delta in lists:
        mean = [math.fsum(column) / len(delta) for column in transpose(delta)]
        scatter = zeros(len(mean), len(mean))
        for row in delta:
            centered = [x - m for x, m in zip(row, mean, strict=True)]
            scatter = plus(scatter, [[x * y for y in centered] for x in centered])
        scatters.append(scatter)
    left, gram = sums(lists, scatters)
    expected = tensor(product(left, pseudo_inverse(gram, len(gram) * EPS32)))
    assert relative_error(call(ACTMAT, deltas, center=True), expected) < bound


def inputs(case: str, samples: int) -> list[Tensor]:
    """Inputs of every expert's task, `samples x I`, the tasks of different size."""
    n_experts = len(experts(case, torch.float64))
    return [(1 + t) * x for t, x in enumerate(random_deltas(n_experts, samples, CASES[case][2], seed=5))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("samples", [14, 1])
@pytest.mark.parametrize(("dtype", "bound"), PRECISION)
def test_lot(case: str, samples: int, dtype: torch.dtype, bound: float) -> None:
    """The least drift of features, `sum_t sum_n ||(D - D_t) x_n||^2`, sample by sample through its normal equations."""
    deltas, lists = experts(case, dtype), []
    for x_NI in inputs(case, samples):
        gram = zeros(x_NI.shape[1], x_NI.shape[1])
        for x in rows(x_NI):
            gram = plus(gram, [[a * b for b in x] for a in x])
        lists.append(gram)
    left, total = sums([rows(d) for d in deltas], lists)
    expected = tensor(product(left, pseudo_inverse(total, len(total) * EPS32)))
    grams = [tensor(g).to(dtype) for g in lists]
    assert relative_error(call(LOT, deltas, statistics={"gram": grams}), expected) < bound


@pytest.mark.parametrize(("rank", "tradeoff"), [(1, 1.0), (2, 0.5), (3, 0.1)])
@pytest.mark.parametrize(("dtype", "bound"), PRECISION)
def test_cat(rank: int, tradeoff: float, dtype: torch.dtype, bound: float) -> None:
    """Two tasks: from each delta the leading directions of the other task's conflict are projected out, one by one."""
    deltas = [d.to(dtype) for d in random_deltas(2, 7, 6, seed=3)]
    samples = random_deltas(2, 9, 6, seed=8)
    expected = torch.zeros(7, 6, dtype=torch.float64)
    for own, other in ((0, 1), (1, 0)):
        # B_other: where `own` moves the outputs on the other task's inputs more than (tradeoff times) on its own
        conflict = torch.zeros(7, 7, dtype=torch.float64)
        for sign, x_NI in ((1.0, samples[other]), (-tradeoff, samples[own])):
            for x in x_NI:
                y = deltas[own].double() @ x
                conflict += sign * torch.outer(y, y)
        values, vectors = torch.linalg.eigh(conflict)
        left = deltas[own].double()
        for k in range(1, rank + 1):
            if values[-k] > 0:
                left = left - torch.outer(vectors[:, -k], vectors[:, -k] @ left)
        expected += left
    grams = [(x.T @ x).to(dtype) for x in samples]
    found = call(CAT, deltas, statistics={"gram": grams}, rank=rank, tradeoff=tradeoff)
    assert relative_error(found, expected) < bound


def masks_of(method: MergeMethod, deltas: Sequence[Tensor], **given: Any) -> list[Tensor]:
    """True where the method keeps an entry of each expert, for the seed that `call` gives."""
    found = []
    for t in range(len(deltas)):
        ones = [torch.ones_like(d) if method is DARE else d for d in deltas]
        kept = call(method, ones, weights=[float(i == t) for i in range(len(deltas))], rescale="none", **given)
        found.append(kept != 0)
    return found


def elected_mean(column: Sequence[float], weights: Sequence[float]) -> float:
    """One entry: the sign of the larger total, then the mean of what has it, weights as counts."""
    total = math.fsum(column)
    agreeing = [t for t, x in enumerate(column) if x * total > 0]
    return math.fsum(column[t] for t in agreeing) / (math.fsum(weights[t] for t in agreeing) or 1.0)


def by_entry(parts: Sequence[Tensor], weights: Sequence[float], rule: str) -> Tensor:
    """The second rule on masked and rescaled deltas, entry by entry."""
    out = []
    for column in zip(*(p.double().flatten().tolist() for p in parts), strict=True):
        votes = [w * x for w, x in zip(weights, column, strict=True)]
        total = math.fsum(votes)
        found = {
            "linear": total,
            "task_arithmetic": 0.4 * total,
            "average": total / math.fsum(weights),
            "ties": elected_mean(votes, weights),
        }
        out.append(found[rule])
    return torch.tensor(out, dtype=torch.float64).view(parts[0].shape)


ELEMENTWISE = [(torch.float64, F64_IDENTITY), (torch.float32, F32_PRODUCT)]


@pytest.mark.parametrize("rule", ["task_arithmetic", "linear", "average", "ties"])
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
@pytest.mark.parametrize(("dtype", "bound"), ELEMENTWISE)
def test_dare(rule: str, rescale: str, dtype: torch.dtype, bound: float) -> None:
    """`m_t D_t / (1 - p)` with the Bernoulli masks, then the rule; p = 0.7."""
    deltas, weights, density = [d.to(dtype) for d in random_deltas(3, 12, 9, seed=2)], [0.5, 1.0, 2.0], 0.3
    parts = []
    for delta, kept in zip(deltas, masks_of(DARE, deltas, density=density, rule="linear"), strict=True):
        entries = [x * k for x, k in zip(delta.double().flatten().tolist(), kept.flatten().tolist(), strict=True)]
        size, left = (math.fsum(map(abs, e)) for e in (delta.double().flatten().tolist(), entries))
        factor = {"inverse": 1 / density, "l1": size / left, "none": 1.0}[rescale]
        parts.append(torch.tensor([factor * x for x in entries], dtype=torch.float64).view(delta.shape))
    found = call(DARE, deltas, weights=weights, density=density, rescale=rescale, rule=rule)
    assert relative_error(found, by_entry(parts, weights, rule)) < bound


@pytest.mark.parametrize("elect", [True, False])
@pytest.mark.parametrize("rescale", ["inverse", "l1"])
@pytest.mark.parametrize(("dtype", "bound"), ELEMENTWISE)
def test_della(elect: bool, rescale: str, dtype: torch.dtype, bound: float) -> None:
    """MagPrune: `p_i` by the rank of the magnitude within its row, kept entries over their own `p_i`, sign election."""
    deltas, weights = [d.to(dtype) for d in random_deltas(3, 12, 9, seed=2)], [0.5, 1.0, 2.0]
    density, epsilon, parts = 0.5, 0.15, []
    masks = masks_of(DELLA, deltas, density=density, epsilon=epsilon, sign_election=False)
    for delta, kept in zip(deltas, masks, strict=True):
        part = torch.zeros(delta.shape, dtype=torch.float64)
        for r, row in enumerate(rows(delta)):
            for rank, (_, i) in enumerate(sorted((abs(x), i) for i, x in enumerate(row))):
                p = density - epsilon + 2 * epsilon * rank / (len(row) - 1)
                part[r, i] = row[i] * float(kept[r, i]) / (p if rescale == "inverse" else 1.0)
        if rescale == "l1":
            part *= float(delta.double().abs().sum() / part.abs().sum())
        parts.append(part)
    found = call(DELLA, deltas, weights=weights, density=density, epsilon=epsilon, rescale=rescale, sign_election=elect)
    assert relative_error(found, by_entry(parts, weights, "ties" if elect else "linear")) < bound


def predicted_entropy(weight: Matrix, x_NI: Matrix) -> float:
    """Mean Shannon entropy of softmax(W x), from its definition."""
    total = 0.0
    for x in x_NI:
        logits = [math.fsum(w * v for w, v in zip(row, x, strict=True)) for row in weight]
        exponents = [math.exp(z - max(logits)) for z in logits]
        p = [e / math.fsum(exponents) for e in exponents]
        total -= math.fsum(q * math.log(q) for q in p)
    return total / len(x_NI)


def test_adamerging() -> None:
    """Five steps of Adam on the entropy, its gradient by central differences of the definition."""
    deltas, (base,) = random_deltas(3, 5, 7, seed=4), random_deltas(1, 5, 7, seed=9)
    x_NI = random_deltas(1, 6, 7, seed=1)[0]
    rate, betas, step = 0.05, (0.9, 0.999), 1e-5

    def loss(coefficients: Sequence[float]) -> float:
        weight = rows(base)
        for c, delta in zip(coefficients, deltas, strict=True):
            weight = plus(weight, rows(delta), c)
        return predicted_entropy(weight, rows(x_NI))

    wanted, first, second = [0.3] * 3, [0.0] * 3, [0.0] * 3
    found, state = torch.full((3,), 0.3, dtype=torch.float64), AdamState.zeros(3)
    for k in range(1, 6):
        gradient = []
        for t in range(3):
            up, down = ([c + sign * step * (i == t) for i, c in enumerate(wanted)] for sign in (1, -1))
            gradient.append((loss(up) - loss(down)) / (2 * step))
        for t, g in enumerate(gradient):
            first[t] = betas[0] * first[t] + (1 - betas[0]) * g
            second[t] = betas[1] * second[t] + (1 - betas[1]) * g * g
            unbiased, spread = first[t] / (1 - betas[0] ** k), math.sqrt(second[t] / (1 - betas[1] ** k))
            wanted[t] -= rate * unbiased / (spread + 1e-8)
        merged = base + call(ADAMERGING, deltas, coefficients=found.tolist())
        weight = merged.requires_grad_()
        entropy(x_NI @ weight.T).backward()
        assert weight.grad is not None
        found, state = adam_step(found, coefficient_gradient(weight.grad, deltas), state, lr=rate)
    assert relative_error(found, torch.tensor(wanted, dtype=torch.float64)) < F32_PRODUCT, "differences have 1e-10"
    expected = zeros(5, 7)
    for c, delta in zip(found.tolist(), deltas, strict=True):
        expected = plus(expected, rows(delta), c)
    assert relative_error(call(ADAMERGING, deltas, coefficients=found.tolist()), tensor(expected)) < F64_IDENTITY
