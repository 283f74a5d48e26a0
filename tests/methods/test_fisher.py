"""Fisher merging against the entrywise ratio, and what each kind of floor is for."""

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import relative_error
from torch import Tensor

from actmat.extras.research.fisher import merge


@pytest.fixture
def experts() -> Experts:
    return Experts.random(3, (5, 7))


def naive(base: Tensor, deltas: list[Tensor], fishers: list[Tensor]) -> Tensor:
    """`sum F W / sum F - W_0`, an entry at a time."""
    out = torch.zeros_like(base)
    for i in range(base.shape[0]):
        for j in range(base.shape[1]):
            top = sum(float(f[i, j]) * float(base[i, j] + d[i, j]) for f, d in zip(fishers, deltas, strict=True))
            out[i, j] = top / sum(float(f[i, j]) for f in fishers) - base[i, j]
    return out


def test_relative_floor(experts: Experts) -> None:
    floored = [f + 0.1 * f.mean() for f in experts.statistics["fisher"]]
    out = merge(experts.deltas, statistics=experts.statistics, floor=0.1).value
    assert relative_error(out, naive(experts.base, experts.deltas, floored)) < 1e-12


@pytest.mark.parametrize("unit", [1e-9, 1e6])
def test_units_of_the_loss_do_not_matter_with_the_relative_floor(experts: Experts, unit: float) -> None:
    other = {"fisher": [unit * f for f in experts.statistics["fisher"]]}
    for use in ("add", "drop"):
        a = merge(experts.deltas, statistics=experts.statistics, floor=0.3, floor_use=use).value
        b = merge(experts.deltas, statistics=other, floor=0.3, floor_use=use).value
        assert relative_error(b, a) < 1e-12


def test_an_entry_that_no_expert_saw_takes_the_mean() -> None:
    deltas = [torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])]
    fisher = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0])]
    out = merge(deltas, statistics={"fisher": fisher}, floor=0.0).value
    assert out.tolist() == pytest.approx([2.0, 2.5])
    nothing = [torch.zeros(2), torch.zeros(2)]
    assert merge(deltas, statistics={"fisher": nothing}).value.tolist() == pytest.approx([2.0, 2.0])


def test_dropped_entries_keep_the_base_and_are_counted() -> None:
    deltas = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([3.0, 3.0, 3.0])]
    fisher = [torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.5, 3.0])]
    out = merge(deltas, statistics={"fisher": fisher}, floor=1.0, floor_unit="absolute", floor_use="drop")
    assert out.value.tolist() == pytest.approx([0.0, 0.0, 2.5])
    assert out.stats["entries_dropped"] == 2
