"""CAT merging against the paper's optimization problem and a projection at a time."""

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import F32_SOLVE, relative_error
from torch import Tensor

from actmat.extras.research.cat import merge


@pytest.fixture
def experts() -> Experts:
    return Experts.random(3, (8, 6))


def naive_basis(deltas: list[Tensor], grams: list[Tensor], k: int, rank: int, tradeoff: float) -> Tensor:
    """The paper's matrix with its own orientation, `T_i = D_i^T` and `y = x T`."""
    total = torch.zeros(deltas[0].shape[0], deltas[0].shape[0], dtype=torch.float64)
    for i in range(len(deltas)):
        if i != k:
            task = deltas[i].T
            total += task.T @ (grams[k] - tradeoff * grams[i]) @ task
    values, vectors = torch.linalg.eigh(total)
    keep = [j for j in range(len(values)) if values[j] > 0][-rank:]
    return vectors[:, keep]


@pytest.mark.parametrize(("rank", "tradeoff"), [(1, 1.0), (2, 1.0), (2, 0.5), (3, 0.1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, F32_SOLVE)])
def test_three_experts_lose_the_span_of_the_other_bases(
    experts: Experts, rank: int, tradeoff: float, dtype: torch.dtype, bound: float
) -> None:
    grams = experts.statistics["gram"]
    bases = [naive_basis(experts.deltas, grams, k, rank, tradeoff) for k in range(3)]
    expected = torch.zeros(8, 6, dtype=torch.float64)
    for i in range(3):
        joint = torch.cat([bases[k] for k in range(3) if k != i], dim=1)
        expected += experts.deltas[i] - joint @ torch.linalg.pinv(joint) @ experts.deltas[i]
    given = experts.to(dtype)
    out = merge(given.deltas, statistics=given.statistics, rank=rank, tradeoff=tradeoff)
    assert relative_error(out.value, expected) < bound
    assert out.stats["directions_removed"] == sum(b.shape[1] for b in bases)


def test_without_conflict_it_is_the_sum(experts: Experts) -> None:
    total = torch.stack(experts.deltas).sum(0)
    assert relative_error(merge(experts.deltas, statistics=experts.statistics, rank=0).value, total) < 1e-14
    # A large trade-off protects each task's own knowledge: no eigenvalue stays positive.
    merged = merge(experts.deltas, statistics=experts.statistics, tradeoff=1e6)
    assert merged.stats["directions_removed"] == 0
    assert relative_error(merged.value, total) < 1e-14


def test_an_expert_that_only_disturbs_the_other_is_silenced() -> None:
    gram = [torch.diag(torch.tensor([1.0, 0.0])).double(), torch.diag(torch.tensor([0.0, 1.0])).double()]
    useful, harmful = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    useful[0, 0] = 1.0  # reads the input that only task 0 has
    harmful[1, 0] = 1.0  # belongs to task 1 but reads the input of task 0
    out = merge([useful, harmful], statistics={"gram": gram}).value
    assert torch.allclose(out, useful, atol=1e-14)


def test_bases_that_coincide_are_projected_out_once(experts: Experts) -> None:
    same = [experts.deltas[0], experts.deltas[1], experts.deltas[1].clone()]
    grams = [experts.statistics["gram"][t] for t in (0, 1, 1)]
    b1 = naive_basis(same, grams, 1, 2, 1.0)
    b2 = naive_basis(same, grams, 2, 2, 1.0)
    assert relative_error(b1 @ b1.T, b2 @ b2.T) < 1e-10
    out = merge(same, statistics={"gram": grams}).value
    b0 = naive_basis(same, grams, 0, 2, 1.0)
    both = torch.cat([b0, b1], dim=1)
    expected = same[0] - b1 @ b1.T @ same[0] + 2 * (same[1] - both @ torch.linalg.pinv(both) @ same[1])
    assert relative_error(out, expected) < 1e-9
