"""CT-Merging against a transcription of its formulae with loops."""

import pytest
import torch
from tests.helpers.spectra import random_deltas, random_lowrank
from tests.tolerances import F32_SOLVE, F64_ORACLE, relative_error

from actmat.methods.ct_merging import merge


def polar(columns):
    u, s, vh = torch.linalg.svd(torch.stack(columns, 1), full_matrices=False)
    on = s > 1e-6 * s[0]
    return u[:, on] @ vh[on]


def naive(deltas, k=16, common=4):
    parts = [torch.linalg.svd(d.double(), full_matrices=False) for d in deltas]
    ranks = [min(k, int((s > 1e-6 * s[0]).sum())) if bool(s.any()) else 0 for _, s, _ in parts]
    stacked = torch.cat([u[:, :r] for (u, _, _), r in zip(parts, ranks, strict=True)], 1)
    basis = torch.linalg.svd(stacked, full_matrices=False).U[:, :common]
    mean = sum(basis.mT @ (u[:, :r] * s[:r]) @ vh[:r] for (u, s, vh), r in zip(parts, ranks, strict=True)) / len(deltas)
    p, level, qh = torch.linalg.svd(mean, full_matrices=False)
    lefts, sizes, rights = [*(basis @ p).mT], [float(level.square().mean().sqrt())] * common, [*qh]
    for (u, s, vh), r in zip(parts, ranks, strict=True):
        for i in range(r):
            lefts.append(u[:, i] - basis @ (basis.mT @ u[:, i]))
            rights.append(vh[i])
            sizes.append(float(s[:r].square().mean().sqrt()))
    left, right = polar(lefts), polar(rights)
    return sum(c * torch.outer(left[:, j], right[:, j]) for j, c in enumerate(sizes))


@pytest.mark.parametrize("shape", [(21, 21), (15, 31), (31, 15)], ids=str)
@pytest.mark.parametrize("options", [{"k": 5}, {"k": 3}, {"k": 3, "common": 2}, {"k": 3, "common": 0}], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, F64_ORACLE), (torch.float32, F32_SOLVE)], ids=str)
def test_is_the_formula(shape, options, dtype, bound):
    deltas = random_deltas(3, *shape, dtype=dtype)
    assert relative_error(merge(deltas, **options).value, naive(deltas, **options)) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adapters_and_an_expert_that_did_not_move(dtype):
    deltas = [*(d.dense().to(dtype) for d in random_lowrank([4, 4], 20, 30)), torch.zeros(20, 30, dtype=dtype)]
    assert relative_error(merge(deltas).value, naive(deltas)) < F32_SOLVE


def test_a_cut_through_equal_singular_values_takes_fewer_common_directions():
    identity = torch.eye(12, dtype=torch.float64)
    apart = [torch.outer(identity[i], identity[i]) + 2 * torch.outer(identity[i + 1], identity[i + 1]) for i in (0, 2)]
    found = merge(apart, common=1)
    assert found.stats["common_min"] == 0
    level = (5 / 2) ** 0.5
    assert (
        relative_error(found.value, torch.diag(torch.tensor([level] * 4 + [0.0] * 8, dtype=torch.float64))) < F64_ORACLE
    )


def test_what_lies_in_the_common_space_leaves_on_both_sides():
    rng = torch.Generator().manual_seed(0)
    row, others = torch.randn(1, 9, generator=rng).double(), torch.randn(2, 9, generator=rng).double()
    column = torch.eye(9, dtype=torch.float64)[:, :1]
    deltas = [column @ row, column @ others[:1]]
    found = merge(deltas, common=1)
    assert found.stats["common_min"] == 1
    assert relative_error(found.value, (deltas[0] + deltas[1]) / 2) < F64_ORACLE
