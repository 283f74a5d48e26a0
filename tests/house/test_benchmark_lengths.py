"""Rows of the evidence that are no methods of the package: lengths per layer, direction and expert; RobustMerge."""

from __future__ import annotations

import pytest
import torch
from benchmarks.evidence import lengths, robust
from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method


def _deltas(n: int = 3, rank: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(12, rank, generator=g, dtype=torch.float64) @ torch.randn(rank, 16, generator=g,
            dtype=torch.float64) for _ in range(n)]  # fmt: skip


@pytest.mark.parametrize("name", ["average", "actmat", "tsv", "dc_merge", "cart"])
def test_a_layer_has_the_mean_norm_and_the_direction_of_its_method(name: str) -> None:
    deltas = _deltas()
    plain, value = get_method(name).merge(deltas).value, lengths.per_layer(name, deltas).value
    assert float(value.norm()) == pytest.approx(lengths.mean_norm(deltas))
    torch.testing.assert_close(value / value.norm(), plain / plain.norm())


def test_every_expert_has_the_same_share_of_its_own_delta() -> None:
    deltas = _deltas()
    value = lengths.per_expert(deltas).value
    shares = torch.tensor([float((d * value).sum() / d.square().sum()) for d in deltas])
    torch.testing.assert_close(shares, shares.mean().expand(3))
    assert float(value.norm()) == pytest.approx(lengths.mean_norm(deltas))


def test_what_one_expert_has_alone_stays_whole_and_what_all_share_counts_once() -> None:
    rows = torch.eye(4, dtype=torch.float64)
    shared, own = torch.ones(3, 1, dtype=torch.float64) @ rows[:1], [rows[:3, [k]] @ rows[[k]] for k in (1, 2)]
    merged = lengths.per_direction([shared + own[0], shared + own[1]]).value
    naive = torch.zeros(3, 4, dtype=torch.float64)
    total = 2 * shared + own[0] + own[1]
    projectors = sum(torch.linalg.pinv(d) @ d for d in (shared + own[0], shared + own[1]))
    values, vectors = torch.linalg.eigh(projectors)
    for value, vector in zip(values, vectors.mT, strict=True):
        naive += (total @ vector[:, None] @ vector[None]) / max(1.0, float(value))
    torch.testing.assert_close(merged, naive)
    torch.testing.assert_close(lengths.per_direction([own[0], own[1]]).value, own[0] + own[1])
    torch.testing.assert_close(lengths.per_direction([shared, shared]).value, shared)


def test_robustmerge_is_its_formula() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 5, 20, generator=g), torch.randn(3, 10, 5, generator=g)
    found = robust.factored([LowRank(y, x) for y, x in zip(b, a, strict=True)]).value
    sum_a, sum_b, sum_s = torch.zeros(5, 20), torch.zeros(10, 5), torch.zeros(5)
    for one_a, one_b in zip(a, b, strict=True):
        kept = []
        for factor in (one_a, one_b):
            least = sorted(factor.abs().flatten().tolist())[int(factor.numel() * 0.8) - 1]
            kept.append(torch.where(factor.abs() >= least, factor, 0.0))
        scales = [float(x.abs().sum() / k.abs().sum()) for x, k in zip(one_a, kept[0], strict=True)]
        scales = [max(s, sorted(scales)[4]) for s in scales]
        sum_a += 2 * kept[0]
        sum_b += 2 * kept[1] * torch.tensor(scales)
        sum_s += torch.tensor(scales)
    torch.testing.assert_close(found.b_OR @ found.a_RI, (sum_b / sum_s) @ sum_a)


def test_robustmerge_has_no_form_for_deltas() -> None:
    with pytest.raises(RecipeError, match="merges factors"):
        robust.dense(_deltas())
