"""Methods without results of their authors' code in tests/parity, against naive transcriptions of their papers.

Random methods are transcribed given their masks, which are read off the method itself (one expert with weight 1, no
rescaling); the law of the masks is tested in test_dare.py and test_della.py.

Shapes: `N` samples, `I` in_features.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers.interference import naive, self_grams
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import F32_PRODUCT, F32_SOLVE, F64_IDENTITY, F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.adamerging import ADAMERGING, AdamState, adam_step, coefficient_gradient, entropy
from actmat.extras.research.dare import DARE
from actmat.extras.research.della import DELLA
from actmat.methods import get_method
from actmat.methods.contract import MergeMethod

ACTMAT = get_method("actmat")
ACTMAT_RIDGE = get_method("actmat_ridge")
LOT = get_method("lot")

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


each_case = pytest.mark.parametrize("case", CASES)
each_precision = pytest.mark.parametrize(("dtype", "bound"), PRECISION)


@each_case
@each_precision
def test_actmat_ridge(case: str, dtype: torch.dtype, bound: float) -> None:
    """`D* = (sum D_t D_t^T D_t)(sum D_t^T D_t + ridge tr(S)/I)^-1`."""
    deltas = experts(case, dtype)
    grams = self_grams(deltas)
    for ridge in (0.01, 0.1, 1.0):
        level = ridge * sum(float(g.trace()) for g in grams) / deltas[0].shape[1]
        expected = naive(deltas, grams, response=lambda values, level=level: values / (values + level))
        assert relative_error(call(ACTMAT_RIDGE, deltas, ridge=ridge), expected) < bound


@each_case
@pytest.mark.parametrize("samples", [14, 1])
@each_precision
def test_lot(case: str, samples: int, dtype: torch.dtype, bound: float) -> None:
    """The least drift of features, `sum_t sum_n ||(D - D_t) x_n||^2`, through its normal equations.

    The tasks' inputs, `samples x I`, are of different size.
    """
    deltas = experts(case, dtype)
    inputs = random_deltas(len(deltas), samples, CASES[case][2], seed=5)
    grams = self_grams([(1 + t) * x for t, x in enumerate(inputs)])
    found = call(LOT, deltas, statistics={"gram": [g.to(dtype) for g in grams]})
    assert relative_error(found, naive(deltas, grams)) < bound


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
    assert all(0.3 < float(kept.double().mean()) < 0.7 for kept in masks), "a half is dropped, as the density says"
    for delta, kept in zip(deltas, masks, strict=True):
        part = torch.zeros(delta.shape, dtype=torch.float64)
        for r, row in enumerate(delta.double().tolist()):
            for rank, (_, i) in enumerate(sorted((abs(x), i) for i, x in enumerate(row))):
                p = density - epsilon + 2 * epsilon * rank / (len(row) - 1)
                part[r, i] = row[i] * float(kept[r, i]) / (p if rescale == "inverse" else 1.0)
        if rescale == "l1":
            part *= float(delta.double().abs().sum() / part.abs().sum())
        parts.append(part)
    found = call(DELLA, deltas, weights=weights, density=density, epsilon=epsilon, rescale=rescale, sign_election=elect)
    assert relative_error(found, by_entry(parts, weights, "ties" if elect else "linear")) < bound


def predicted_entropy(weight: Tensor, x_NI: Tensor) -> float:
    """Mean Shannon entropy of softmax(W x), from its definition."""
    powers = (x_NI @ weight.T).exp()
    p = powers / powers.sum(1, keepdim=True)
    return float(-(p * p.log()).sum(1).mean())


def summed(coefficients: Sequence[float], deltas: Sequence[Tensor]) -> Tensor:
    return torch.stack([c * d for c, d in zip(coefficients, deltas, strict=True)]).sum(0)


def test_adamerging() -> None:
    """Five steps of Adam on the entropy, its gradient by central differences of the definition."""
    deltas, (base,) = random_deltas(3, 5, 7, seed=4), random_deltas(1, 5, 7, seed=9)
    x_NI = random_deltas(1, 6, 7, seed=1)[0]
    rate, betas, step = 0.05, (0.9, 0.999), 1e-5
    wanted, first, second = [0.3] * 3, [0.0] * 3, [0.0] * 3
    found, state = torch.full((3,), 0.3, dtype=torch.float64), AdamState.zeros(3)
    for k in range(1, 6):
        gradient = []
        for t in range(3):
            ends = ([c + sign * step * (i == t) for i, c in enumerate(wanted)] for sign in (1, -1))
            up, down = (predicted_entropy(base + summed(c, deltas), x_NI) for c in ends)
            gradient.append((up - down) / (2 * step))
        for t, g in enumerate(gradient):
            first[t] = betas[0] * first[t] + (1 - betas[0]) * g
            second[t] = betas[1] * second[t] + (1 - betas[1]) * g * g
            unbiased, spread = first[t] / (1 - betas[0] ** k), math.sqrt(second[t] / (1 - betas[1] ** k))
            wanted[t] -= rate * unbiased / (spread + 1e-8)
        merged = base + call(ADAMERGING, deltas, coefficients=found.tolist())
        weight = merged.requires_grad_()
        entropy(x_NI @ weight.T).backward()
        found, state = adam_step(found, coefficient_gradient(weight.grad, deltas), state, lr=rate)
    assert relative_error(found, torch.tensor(wanted, dtype=torch.float64)) < F32_PRODUCT, "differences have 1e-10"
    expected = summed(found.tolist(), deltas)
    assert relative_error(call(ADAMERGING, deltas, coefficients=found.tolist()), expected) < F64_IDENTITY
