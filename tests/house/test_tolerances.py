"""The tolerances mean what they say: ordered by precision, above the arithmetic's noise, far below a real error."""

from __future__ import annotations

import pytest
import torch
from tests import tolerances
from tests.tolerances import (
    BF16_ROUNDING,
    F16_ROUNDING,
    F32_ELEMENTWISE,
    F32_PRODUCT,
    F32_SOLVE,
    F64_IDENTITY,
    F64_ORACLE,
    relative_error,
)


def test_they_are_ordered() -> None:
    assert F64_IDENTITY < F64_ORACLE < F32_ELEMENTWISE < F32_PRODUCT < F32_SOLVE < F16_ROUNDING < BF16_ROUNDING


def test_every_one_has_a_reason() -> None:
    with open(tolerances.__file__) as file:
        source = file.read()
    for name in tolerances.NAMES:
        assert f"\n{name} = " in source
        assert source.split(f"\n{name} = ")[1].splitlines()[1].startswith('"""'), name


@pytest.mark.parametrize(("kind", "bound"), [(torch.bfloat16, BF16_ROUNDING), (torch.float16, F16_ROUNDING)])
def test_one_rounding_stays_inside(kind: torch.dtype, bound: float) -> None:
    value = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 0.5
    rounded = value.to(kind).float()
    assert ((rounded - value).abs() <= bound * value.abs()).all()
    assert relative_error(rounded, value) > bound / 16


def test_relative_error() -> None:
    expected = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(expected * 1.5, expected) == pytest.approx(0.5)
    assert relative_error(expected, torch.zeros(2, 2)) == pytest.approx(5.0)
    assert relative_error(torch.full((1,), torch.nan), torch.ones(1)) != relative_error(torch.ones(1), torch.ones(1))
    with pytest.raises(AssertionError, match="shape"):
        relative_error(torch.zeros(1, 2), torch.zeros(2))
