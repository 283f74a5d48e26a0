"""ACE against a transcription of its published code, its gate, experts it leaves out, and its low-rank form."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers.spectra import random_deltas, random_lowrank
from tests.tolerances import F32_PRODUCT, F64_ORACLE, relative_error
from torch import Tensor

from actmat.errors import NumericalError, RecipeError
from actmat.extras.research.ace import ACE, heterogeneity, merge
from actmat.linalg.lowrank import LowRank

assert ACE.lowrank is not None
merge_lowrank = ACE.lowrank.merge


def naive(deltas: list[Tensor], *, eps: float, is_open: bool, leading: float = 0.3) -> Tensor:
    """Full inverses and SVDs in float64, term by term."""
    deltas = [d.double() for d in deltas]
    count, (rows, width) = len(deltas), deltas[0].shape
    centred = [d - d.mean(0, keepdim=True) for d in deltas]
    scatters = [c.T @ c for c in centred]
    traces = [float(s.trace()) if is_open else 1.0 for s in scatters]
    scatters = [s / r for s, r in zip(scatters, traces, strict=True)]
    ridged = [s + eps / r * torch.eye(width).double() for s, r in zip(scatters, traces, strict=True)]
    row = sum(scatters).mean(0, keepdim=True)
    if is_open:
        row = row / (sum(float(d.square().sum()) for d in deltas) / count)
    left = sum(c @ r for c, r in zip(centred, ridged, strict=True))
    value = left @ torch.linalg.inv(sum(ridged) + row)
    if not is_open:
        return value
    mean = sum(ridged) / count
    target = value + sum(d @ (s - mean) for d, s in zip(deltas, scatters, strict=True))
    u, s, vh = torch.linalg.svd(target, full_matrices=False)
    k = int(leading * min(rows, width))
    return value + s[:k].mean() * u[:, :k] @ vh[:k]


@pytest.mark.parametrize("shape", [(3, 14, 14), (2, 20, 9), (4, 8, 21), (1, 12, 10)])
@pytest.mark.parametrize("gate", ["on", "off"])
@pytest.mark.parametrize("eps", [1e-2, 1.0])
def test_equals_the_published_code(shape, gate, eps):
    deltas = random_deltas(*shape)
    found = merge(deltas, eps=eps, gate=gate)
    assert relative_error(found.value, naive(deltas, eps=eps, is_open=gate == "on")) < F64_ORACLE
    assert found.stats["gates_open"] == (gate == "on")


def test_float32_is_near_float64():
    deltas = random_deltas(3, 24, 16, dtype=torch.float32)
    for gate in ("on", "off"):
        found = merge(deltas, gate=gate, eps=1e-4)
        assert found.value.dtype == torch.float32
        assert relative_error(found.value, naive(deltas, eps=1e-4, is_open=gate == "on")) < F32_PRODUCT


def test_the_gate_follows_the_heterogeneity():
    even = random_deltas(3, 10, 8)
    uneven = [even[0], 30 * even[1], even[2] / 30]
    shut, opened = merge(even), merge(uneven)
    assert (shut.stats["gates_open"], opened.stats["gates_open"]) == (0, 1)
    assert relative_error(shut.value, naive(even, eps=1e-2, is_open=False)) < F64_ORACLE
    assert relative_error(opened.value, naive(uneven, eps=1e-2, is_open=True)) < F64_ORACLE
    assert merge(uneven, threshold=1e9).stats["gates_open"] == 0


def test_a_common_factor_of_all_experts_opens_the_gate():
    """The trap of the method: the same experts in another unit. With the gate fixed only the ridge is left of it."""
    deltas = [n * d / d.norm() for n, d in zip((3.0, 3.2, 2.9), random_deltas(3, 12, 12), strict=True)]
    smaller = [d / 3 for d in deltas]
    one, other = merge(deltas), merge(smaller)
    assert one.stats["heterogeneity_max"] < 0.1
    assert other.stats["heterogeneity_max"] > 1
    assert (one.stats["gates_open"], other.stats["gates_open"]) == (0, 1)
    assert relative_error(3 * other.value, one.value) > 0.3
    fixed = [merge(ds, gate="off", eps=e).value for ds, e in ((deltas, 9e-3), (smaller, 1e-3))]
    assert relative_error(3 * fixed[1], fixed[0]) < 1e-13, "a ridge in the deltas' own unit makes it homogeneous"


def test_heterogeneity_of_known_norms():
    assert heterogeneity([5.0]) == 0.0
    assert heterogeneity([math.e, math.e]) == 0.0
    assert heterogeneity([math.exp(1), math.exp(2), math.exp(3)]) == pytest.approx(1 / 4, rel=1e-10)


@pytest.mark.parametrize("gate", ["on", "off", "auto"])
def test_experts_without_a_spread_over_rows_are_left_out(gate):
    deltas = random_deltas(3, 10, 8)
    equal_rows = torch.ones(10, 1).double() * random_deltas(1, 1, 8, seed=5)[0]
    for extra in (torch.zeros(10, 8).double(), equal_rows):
        found = merge([*deltas[:1], extra, *deltas[1:]], gate=gate)
        assert torch.equal(found.value, merge(deltas, gate=gate).value)
        assert found.stats["left_out"] == 1
    nothing = merge([equal_rows, equal_rows], gate=gate)
    assert not nothing.value.any()
    assert nothing.stats["gates_open"] == 0


def test_one_expert_is_not_returned():
    delta = random_deltas(1, 40, 16)[0] + 0.3
    found = merge([delta], eps=1e-9)
    assert found.stats["heterogeneity_max"] == 0
    assert relative_error(found.value, delta) > 0.2


def test_too_few_directions_leave_the_refinement_out():
    deltas = random_deltas(2, 3, 9)
    plain = naive(deltas, eps=1e-2, is_open=True, leading=1.0)
    whole = merge(deltas, gate="on", leading=1.0).value
    assert relative_error(whole, plain) < F64_ORACLE
    assert bool(merge(deltas, gate="on").value.isfinite().all())  # int(0.3 * 3) = 0


def test_a_ridge_below_float64_is_an_error():
    deltas = [1e9 * d.dense() for d in random_lowrank(2, 12, 16, rank=2)]
    with pytest.raises(NumericalError, match="a larger eps"):
        merge(deltas, gate="off", eps=1e-9)


@pytest.mark.parametrize("gate", ["on", "off", "auto"])
def test_batches_are_merged_element_by_element(gate):
    deltas = random_deltas(3, 4, 8, 6)
    deltas[0][1] *= 50
    deltas[2][2] = 0
    found = merge(deltas, gate=gate)
    for element in range(4):
        own = merge([d[element] for d in deltas], gate=gate)
        assert relative_error(found.value[element], own.value) < 1e-13
    assert found.stats["left_out"] == 1
    assert found.stats["gates_open"] == {"on": 4, "off": 0, "auto": 1}[gate]


@pytest.mark.parametrize("gate", ["on", "off"])
@pytest.mark.parametrize(("shape", "ranks"), [((24, 40), (2, 3, 2)), ((40, 24), (2, 1, 4)), ((6, 30), (3, 3, 3))])
def test_lowrank_equals_dense(gate, shape, ranks):
    deltas = [random_lowrank(1, *shape, rank=r, seed=r + i)[0] for i, r in enumerate(ranks)]
    found = merge_lowrank(deltas, gate=gate)
    dense = merge([d.dense() for d in deltas], gate=gate)
    assert found.value.rank <= sum(ranks) + 1
    assert relative_error(found.value.dense(), dense.value) < F64_ORACLE
    assert found.stats["left_out"] == dense.stats["left_out"] == 0


def test_lowrank_batches_and_zero_adapters():
    deltas = random_lowrank(3, 12, 14, rank=2, batch=(3,))
    deltas[1] = LowRank(torch.zeros_like(deltas[1].b_OR), deltas[1].a_RI)
    found = merge_lowrank(deltas, gate="on")
    dense = merge([d.dense() for d in deltas], gate="on")
    assert relative_error(found.value.dense(), dense.value) < F64_ORACLE
    assert found.stats["left_out"] == 3


def test_the_old_meaning_of_the_name_is_told():
    with pytest.raises(RecipeError, match="now called 'centred'"):
        ACE.resolve_options({"rtol": 1e-6})
    assert "zero delta" in ACE.about.plan_note
