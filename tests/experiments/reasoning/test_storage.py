"""Half an ulp, and what survives storage, against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch

from actmat_experiments.reasoning.small.experiment import half_ulp, survival


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_an_ulp_is_half_the_way_to_the_next_number(dtype: torch.dtype) -> None:
    weights = torch.tensor([1.0, 1.5, 2.0, 3.9, 0.02, -0.02, 7e-3, 100.0]).to(dtype)
    bits = weights.abs().view(torch.int16)
    above = (bits + 1).view(dtype).double() - weights.abs().double()
    assert torch.equal(half_ulp(weights.float(), dtype), above / 2)


def test_changes_below_half_an_ulp_are_lost_and_above_are_kept() -> None:
    base = {"w": torch.full((1000,), 1.0)}
    small = survival(base, {"w": base["w"] + 2.0**-9})
    assert (small.changed, small.survives, small.above_half_ulp) == (1.0, 0.0, 0.0)
    assert (small.energy, small.error) == (0.0, 1.0)
    large = survival(base, {"w": base["w"] + 2.0**-7})
    assert (large.survives, large.above_half_ulp, large.energy, large.error) == (1.0, 1.0, 1.0, 0.0)
    assert large.relative_change == pytest.approx(2.0**-7)


def test_shares_are_over_all_weights_of_all_tensors() -> None:
    base = {"a": torch.ones(3), "b": torch.ones(1, 1)}
    expert = {"a": torch.tensor([1.0, 1.0, 1.0 + 2.0**-7]), "b": torch.full((1, 1), 1.0 + 2.0**-12)}
    found = survival(base, expert)
    assert (found.changed, found.survives, found.above_half_ulp) == (0.5, 0.25, 0.25)
    error = math.sqrt(2.0**-24) / math.sqrt(2.0**-14 + 2.0**-24)
    assert found.error == pytest.approx(error)


def test_dense_noise_far_below_an_ulp_survives_in_proportion() -> None:
    """A change of a tenth of an ulp crosses a rounding boundary for about a tenth of the weights."""
    generator = torch.Generator().manual_seed(0)
    base = 1.0 + torch.rand(200_000, generator=generator)
    found = survival({"w": base}, {"w": base + 0.1 * 2.0**-7})
    assert found.changed == 1.0
    assert found.survives == pytest.approx(0.1, abs=0.01)
    assert found.error > 2.0


def test_no_change_is_no_division_by_zero() -> None:
    same = {"w": torch.ones(4)}
    found = survival(same, same)
    assert (found.changed, found.relative_change, found.energy, found.error) == (0.0, 0.0, 0.0, 0.0)
