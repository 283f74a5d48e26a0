"""NearSwap against its definition on the weights."""

from __future__ import annotations

import pytest
import torch

from actmat.extras.research.nearswap import merge


@pytest.mark.parametrize("t", [1e-3, 0.05, 10.0])
def test_interpolation_weight_is_t_over_the_distance(t: float) -> None:
    rng = torch.Generator().manual_seed(0)
    base, expert = torch.randn(2, 50, generator=rng, dtype=torch.float64)
    weight = (t / (expert - base).abs()).clamp(max=1)
    expected = weight * expert + (1 - weight) * base - base
    torch.testing.assert_close(merge([expert - base], t=t).value, expected, rtol=0, atol=1e-14)


def test_no_entry_moves_further_than_t() -> None:
    out = merge([torch.tensor([-3.0, -0.1, 0.0, 0.1, 3.0])], t=0.5).value
    assert out.tolist() == pytest.approx([-0.5, -0.1, 0.0, 0.1, 0.5])


def test_one_expert_only() -> None:
    with pytest.raises(ValueError, match="not 2 experts"):
        merge([torch.ones(2)] * 2)
