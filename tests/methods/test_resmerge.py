"""ResMerge against a transcription of its published code, its branches and traps, and its exact low-rank form."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.helpers.laws import law_gap
from tests.helpers.spectra import random_deltas, random_lowrank
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.resmerge import RESMERGE, merge
from actmat.linalg.lowrank import LowRank

assert RESMERGE.lowrank is not None
merge_lowrank = RESMERGE.lowrank.merge


def cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 1.0


def naive(deltas: list[Tensor], *, damping: float = 0.3, budget: float = 0.2, head: int = 1) -> Tensor:
    """Matrices and pairs one by one, in float64."""
    deltas, count, heads = [d.double() for d in deltas], len(deltas), []
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        heads.append((u[:, :head] * s[:head]) @ vh[:head])
    rests = [d - h for d, h in zip(deltas, heads, strict=True)]
    units = [r / r.norm() if float(r.norm()) else r for r in rests]
    total = sum(units, torch.zeros_like(units[0]))
    shared = total / total.norm() if float(total.norm()) else total
    coherence = sum(cosine(q, shared) for q in units) / count
    similarity = mean_of([cosine(a, b) for a, b in itertools.combinations(units, 2)])
    if coherence <= 1 / math.sqrt(count):
        out = sum(rests, torch.zeros_like(rests[0])) / count
    else:
        exponent = 1 - damping * ((similarity + 1) / 2 + (coherence + 1) / 2) / 2
        out = coherence**exponent * sum(float(r.norm()) for r in rests) / count * shared
    own = [h for h in heads if float(h.norm())]
    agreement = mean_of([max(0.0, cosine(a, b)) for a, b in itertools.combinations(own, 2)])
    mean_head = sum(heads, torch.zeros_like(heads[0])) / count
    return out + budget * agreement * out.norm() * mean_head / mean_head.norm()


def alike(count: int, rows: int, columns: int, share: float, seed: int = 0) -> list[Tensor]:
    """Experts with a common part."""
    common, *own = random_deltas(count + 1, rows, columns, seed=seed)
    return [share * common + d for d in own]


@pytest.mark.parametrize("shape", [(16, 16), (12, 30), (30, 12)])
@pytest.mark.parametrize("share", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64_ORACLE), (torch.float32, 2e-5)])
def test_equals_the_published_code(shape, share, dtype, bound):
    deltas = [d.to(dtype) for d in alike(3, *shape, share)]
    found = merge(deltas)
    assert found.value.dtype == dtype
    assert relative_error(found.value, naive(deltas)) < bound


def test_options():
    deltas = alike(4, 14, 11, 1.0)
    assert relative_error(merge(deltas, score=False).value, naive(deltas, damping=0)) < F64_ORACLE
    assert relative_error(merge(deltas, damping=1.0).value, naive(deltas, damping=1.0)) < F64_ORACLE
    assert relative_error(merge(deltas, head_budget=0.0).value, naive(deltas, budget=0.0)) < F64_ORACLE
    assert relative_error(merge(deltas, head=3).value, naive(deltas, head=3)) < F64_ORACLE


def test_both_branches_are_recorded():
    together, apart = merge(alike(3, 12, 12, 2.0)), alike(3, 12, 12, 0.0)
    apart[2] = -(apart[0] + apart[1])
    opposed = merge(apart)
    assert together.stats["on_sphere"] == 1
    assert together.stats["coherence_max"] > 1 / math.sqrt(3)
    assert opposed.stats["on_sphere"] == 0
    assert relative_error(opposed.value, naive(apart)) < F64_ORACLE


def test_the_length_jumps_at_the_coherence_of_independent_residuals():
    """The trap: noise decides the branch. Two experts, their residuals' cosine just above and just below zero."""

    def residual_norm(tilt: float) -> float:
        left, right = torch.eye(8).double(), torch.eye(8).double()
        head = 10 * torch.outer(left[0], right[0])
        one, other = torch.outer(left[1], right[1]), torch.outer(left[2], right[2])
        deltas = [head + one, head + other + tilt * one]
        return float(merge(deltas, head_budget=0.0).value.norm())

    below, above = residual_norm(-1e-9), residual_norm(1e-9)
    exponent = 1 - 0.3 * (1 / 2 + (1 / math.sqrt(2) + 1) / 2) / 2
    assert above / below == pytest.approx(2 ** (-(exponent - 1) / 2), rel=1e-7)
    assert above / below > 1.05


def test_one_expert_keeps_its_residual_and_a_fifth_of_its_norm_as_head():
    delta = random_deltas(1, 12, 9)[0]
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    head = torch.outer(u[:, 0], vh[0])
    rest = delta - s[0] * head
    assert relative_error(merge([delta]).value, rest + 0.2 * rest.norm() * head) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_of_rank_one_have_no_residual(dtype):
    deltas = [d.dense().to(dtype) for d in random_lowrank(3, 12, 9, rank=1)]
    found = merge(deltas)
    assert not found.value.any()
    assert found.stats["no_residual"] == 3


def test_a_zero_expert_counts_among_residuals_and_not_among_heads():
    deltas = alike(3, 12, 10, 2.0)
    padded = [*deltas, torch.zeros(12, 10).double()]
    assert relative_error(merge(padded).value, naive(padded)) < F64_ORACLE
    assert float(merge(padded).value.norm()) < 0.9 * float(merge(deltas).value.norm())
    assert not merge([torch.zeros(3, 4)] * 2).value.any()


@pytest.mark.parametrize("law", sorted(RESMERGE.laws))
@pytest.mark.parametrize("share", [0.0, 2.0])
def test_declared_laws_on_both_branches(law, share):
    assert law_gap(law, lambda d: merge(d).value, alike(3, 14, 9, share)) < 1e-11


def test_large_matrices_are_summed_in_blocks():
    deltas = alike(3, 300, 400, 0.2)  # more entries than a block
    assert relative_error(merge(deltas).value, naive(deltas)) < F64_ORACLE


def test_batches_are_merged_element_by_element():
    deltas = [torch.stack([a, b]) for a, b in zip(alike(3, 8, 6, 2.0), alike(3, 8, 6, 0.0, seed=4), strict=True)]
    deltas[1][1] = 0
    found = merge(deltas)
    for element in range(2):
        assert relative_error(found.value[element], merge([d[element] for d in deltas]).value) < 1e-13
    assert found.stats["no_residual"] == 1


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (5, 40)])
@pytest.mark.parametrize("options", [{}, {"head": 2}, {"score": False}])
def test_lowrank_equals_dense(shape, options):
    deltas = random_lowrank(3, *shape, rank=4)
    deltas[2] = LowRank(torch.cat([deltas[2].b_OR, deltas[0].b_OR], -1), torch.cat([deltas[2].a_RI, deltas[0].a_RI]))
    found = merge_lowrank(deltas, **options)
    dense = merge([d.dense() for d in deltas], **options)
    assert relative_error(found.value.dense(), dense.value) < 1e-10
    assert found.stats.keys() == dense.stats.keys()
    assert found.stats["on_sphere"] == dense.stats["on_sphere"]
